#include "xxh3.h"

#include <bit>
#include <cstring>

namespace ampfuse::checkpoint::detail {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read in the order of memory");

constexpr uint64_t kPrime32_1 = 0x9e3779b1;
constexpr uint64_t kPrime32_2 = 0x85ebca77;
constexpr uint64_t kPrime32_3 = 0xc2b2ae3d;
constexpr uint64_t kPrime64_1 = 0x9e3779b185ebca87;
constexpr uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr uint64_t kPrime64_3 = 0x165667b19e3779f9;
constexpr uint64_t kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr uint64_t kPrime64_5 = 0x27d4eb2f165667c5;
constexpr uint64_t kPrimeOfAvalanche = 0x165667919e3779f9;
constexpr uint64_t kPrimeOf4To8 = 0x9fb21c651e98df25;

constexpr uint64_t kSecret[] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

template <typename Word = uint64_t>
Word word_at(const void* bytes, size_t offset = 0) {
  Word word;
  std::memcpy(&word, static_cast<const char*>(bytes) + offset, sizeof word);
  return word;
}

uint64_t secret_at(size_t offset) {
  return word_at(kSecret, offset);
}

// Returns two consecutive words of the secret, combined.
uint64_t secret_pair_at(size_t offset) {
  return secret_at(offset) ^ secret_at(offset + 8);
}

uint64_t xor_shifted(uint64_t word, int shift) {
  return word ^ word >> shift;
}

uint64_t avalanche(uint64_t word) {
  return xor_shifted(xor_shifted(word, 37) * kPrimeOfAvalanche, 32);
}

uint64_t avalanche_of_xxh64(uint64_t word) {
  return xor_shifted(xor_shifted(xor_shifted(word, 33) * kPrime64_2, 29) * kPrime64_3, 32);
}

// Returns all 128 bits of a product.
Hash128 full_product(uint64_t one, uint64_t other) {
  const auto product = static_cast<unsigned __int128>(one) * other;
  return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

uint64_t folded_product(uint64_t one, uint64_t other) {
  const Hash128 product = full_product(one, other);
  return product.low ^ product.high;
}

Hash128 hash_of_0() {
  return {avalanche_of_xxh64(secret_pair_at(64)), avalanche_of_xxh64(secret_pair_at(80))};
}

Hash128 hash_of_1_to_3(const char* bytes, size_t length) {
  const auto byte = [&](size_t i) -> uint32_t { return static_cast<unsigned char>(bytes[i]); };
  const uint32_t word = byte(length - 1) | static_cast<uint32_t>(length) << 8 | byte(0) << 16 |
                        byte(length / 2) << 24;
  const auto keyed = [](uint32_t value, size_t offset) {
    return value ^ word_at<uint32_t>(kSecret, offset) ^ word_at<uint32_t>(kSecret, offset + 4);
  };
  return {avalanche_of_xxh64(keyed(word, 0)),
          avalanche_of_xxh64(keyed(std::rotl(__builtin_bswap32(word), 13), 8))};
}

Hash128 hash_of_4_to_8(const char* bytes, size_t length) {
  const uint64_t last = word_at<uint32_t>(bytes, length - 4);
  const uint64_t word = word_at<uint32_t>(bytes) | last << 32;
  auto [low, high] = full_product(word ^ secret_pair_at(16), kPrime64_1 + 4 * length);
  high += 2 * low;
  low = xor_shifted(low ^ high >> 3, 35) * kPrimeOf4To8;
  return {xor_shifted(low, 28), avalanche(high)};
}

Hash128 hash_of_9_to_16(const char* bytes, size_t length) {
  const uint64_t last = word_at(bytes, length - 8);
  const uint64_t upper = last ^ secret_pair_at(48);
  Hash128 hash = full_product(word_at(bytes) ^ last ^ secret_pair_at(32), kPrime64_1);
  hash.low += (length - 1) << 54;
  hash.high += upper + static_cast<uint32_t>(upper) * (kPrime32_2 - 1);
  const auto [low, high] = full_product(hash.low ^ __builtin_bswap64(hash.high), kPrime64_2);
  return {avalanche(low), avalanche(high + hash.high * kPrime64_2)};
}

// Mixes two times 16 bytes into a hash of 17 to 240 bytes.
void mix(Hash128& hash, const char* one, const char* other, size_t offset) {
  const uint64_t a = word_at(one), b = word_at(one, 8);
  const uint64_t c = word_at(other), d = word_at(other, 8);
  hash.low += folded_product(a ^ secret_at(offset), b ^ secret_at(offset + 8));
  hash.low ^= c + d;
  hash.high += folded_product(c ^ secret_at(offset + 16), d ^ secret_at(offset + 24));
  hash.high ^= a + b;
}

Hash128 hash_of_17_to_240(const char* bytes, size_t length) {
  Hash128 hash = {length * kPrime64_1, 0};
  const auto mix_chunk = [&](size_t chunk, size_t offset) {
    mix(hash, bytes + 32 * chunk, bytes + 32 * chunk + 16, offset);
  };
  if (length <= 128) {
    for (size_t i = (length + 31) / 32; i-- > 0;) {
      mix(hash, bytes + 16 * i, bytes + length - 16 * (i + 1), 32 * i);
    }
  } else {
    for (size_t i = 0; i < 4; ++i) mix_chunk(i, 32 * i);
    hash = {avalanche(hash.low), avalanche(hash.high)};
    for (size_t i = 4; i < length / 32; ++i) mix_chunk(i, 32 * (i - 4) + 3);
    mix(hash, bytes + length - 16, bytes + length - 32, 103);
  }
  const uint64_t high = hash.low * kPrime64_1 + hash.high * kPrime64_4 + length * kPrime64_2;
  return {avalanche(hash.low + hash.high), -avalanche(high)};
}

constexpr size_t kStripe = 64;
constexpr size_t kLanes = 8;  // words of a stripe
constexpr size_t kStripesOfBlock = (sizeof kSecret - kStripe) / sizeof(uint64_t);
constexpr size_t kPrefetched = 512;  // bytes ahead; without prefetches, it takes a fifth longer

// The sums of a long input, one for each word of a stripe.
struct Sums {
  uint64_t lane[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                           kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
};

void add_stripe(Sums& sums, const char* stripe, size_t offset) {
  uint64_t words[kLanes], keys[kLanes];
  std::memcpy(words, stripe, kStripe);
  std::memcpy(keys, reinterpret_cast<const char*>(kSecret) + offset, kStripe);
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t keyed = words[i] ^ keys[i];
    sums.lane[i] += words[i ^ 1] + (keyed & 0xffffffff) * (keyed >> 32);
  }
}

void scramble(Sums& sums) {
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t keyed = xor_shifted(sums.lane[i], 47) ^ kSecret[kStripesOfBlock + i];
    sums.lane[i] = keyed * kPrime32_1;
  }
}

uint64_t merged(const Sums& sums, uint64_t start, size_t offset) {
  for (size_t i = 0; i < kLanes; i += 2) {
    start += folded_product(sums.lane[i] ^ secret_at(offset + 8 * i),
                            sums.lane[i + 1] ^ secret_at(offset + 8 * i + 8));
  }
  return avalanche(start);
}

Hash128 hash_of_more_than_240(const char* bytes, size_t length) {
  Sums sums;
  const size_t stripes = (length - 1) / kStripe;  // without the last 1 to 64 bytes
  size_t stripe = 0;
  for (; stripe + kStripesOfBlock <= stripes; stripe += kStripesOfBlock) {
    for (size_t i = 0; i < kStripesOfBlock; ++i) {
      const char* begin = bytes + kStripe * (stripe + i);
      __builtin_prefetch(begin + kPrefetched);
      add_stripe(sums, begin, 8 * i);
    }
    scramble(sums);
  }
  for (size_t i = 0; stripe + i < stripes; ++i) {
    add_stripe(sums, bytes + kStripe * (stripe + i), 8 * i);
  }
  add_stripe(sums, bytes + length - kStripe, sizeof kSecret - kStripe - 7);
  return {merged(sums, length * kPrime64_1, 11),
          merged(sums, ~(length * kPrime64_2), sizeof kSecret - kStripe - 11)};
}

}  // namespace

Hash128 xxh3_128(std::string_view bytes) {
  const size_t length = bytes.size();
  if (length == 0) return hash_of_0();
  if (length <= 3) return hash_of_1_to_3(bytes.data(), length);
  if (length <= 8) return hash_of_4_to_8(bytes.data(), length);
  if (length <= 16) return hash_of_9_to_16(bytes.data(), length);
  if (length <= 240) return hash_of_17_to_240(bytes.data(), length);
  return hash_of_more_than_240(bytes.data(), length);
}

}  // namespace ampfuse::checkpoint::detail
