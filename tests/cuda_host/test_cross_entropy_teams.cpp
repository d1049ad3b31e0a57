// The choice of teams for rows on each device, and how much of a row they keep. No kernel is
// launched.
#include "simt/simt.h"

#include "cuda/cross_entropy_teams.cuh"

#include <torch/headeronly/util/BFloat16.h>

#include "catch.h"

using ampfuse::DeviceRoom;
using ampfuse::kMostStaticShared;
using ampfuse::RowWork;
using c10::BFloat16;

namespace {

constexpr int64_t kKiB = 1024;
const DeviceRoom kA100 = {108, 164 * kKiB, 163 * kKiB, 40 * kKiB * kKiB};
const DeviceRoom kH200 = {132, 228 * kKiB, 227 * kKiB, 50 * kKiB * kKiB};
const DeviceRoom kL4 = {58, 100 * kKiB, 99 * kKiB, 48 * kKiB * kKiB};

struct RowChoice {
  RowWork work;
  int size;  // threads
  int teams;
  int blocks_per_multiprocessor;
  bool l2_holds_rest;
  ampfuse::RowLaunch launch;
  int64_t most_held = 0;  // classes
};

// Returns what is chosen for rows of a loss.
template <typename scalar_t>
RowChoice row_choice(const DeviceRoom& room, int64_t classes, bool plain, int64_t rows = 10000) {
  RowChoice it = {};
  ampfuse::for_forward_rows<scalar_t>(room, classes, plain, [&]<typename Team, RowWork kWork>() {
    const ampfuse::TeamRoom<scalar_t, Team, kWork> team_room{room};
    it = {.work = kWork,
          .size = Team::kSize,
          .teams = Team::kTeams,
          .blocks_per_multiprocessor = ampfuse::kRowBlocks<kWork, scalar_t, Team>,
          .l2_holds_rest = team_room.l2_holds_rest(classes * int64_t(sizeof(scalar_t))),
          .launch = ampfuse::row_launch<scalar_t, Team, kWork>(room, rows, classes, true)};
    if constexpr (is_held(kWork)) {
      it.most_held = ampfuse::HeldRow<kWork, scalar_t, Team>::kMostClasses;
    }
  });
  return it;
}

}  // namespace

TEST_CASE("longer rows have larger teams") {
  using Sizes = std::vector<std::pair<int64_t, int>>;
  const auto check = []<typename scalar_t>(scalar_t, const DeviceRoom& room, bool plain,
                                           const Sizes& sizes) {
    for (const auto& [classes, size] : sizes) {
      CAPTURE(classes, plain);
      CHECK(row_choice<scalar_t>(room, classes, plain).size == size);
    }
  };
  // A row of 64 KB fits in a third of shared memory.
  check(BFloat16(), kH200, false,
        {{128, 32}, {4096, 32}, {4097, 256}, {32000, 256}, {50257, 512}, {256000, 512}});
  // Each thread of a team that holds its row has at most 32 logits. Of longer rows, 264 blocks that
  // do not keep 85 KB each need 22 MB of the L2 cache; with 144 KB it is too much.
  check(BFloat16(), kH200, true,
        {{1, 8},
         {256, 8},
         {257, 32},
         {1024, 32},
         {1025, 64},
         {2048, 64},
         {2049, 128},
         {4097, 256},
         {8193, 512},
         {16384, 512},
         {16385, 512},
         {50257, 512},
         {100000, 512},
         {128256, 1024}});
  check(0.0f, kH200, true, {{128, 8}, {2048, 32}, {2049, 256}, {50000, 512}, {64128, 1024}});
  check(0.0, kH200, true, {{256000, 256}});
  DeviceRoom whole = kH200;
  whole.prefers_whole = true;
  check(BFloat16(), whole, true, {{100000, 512}});
  check(0.0f, whole, true, {{28000, 512}, {29000, 1024}, {57000, 1024}});
  DeviceRoom twice = kH200;
  twice.holds_twice = true;
  check(BFloat16(), twice, true,
        {{256, 8},
         {257, 16},
         {1024, 16},
         {1025, 64},
         {4096, 64},
         {4097, 128},
         {8192, 128},
         {8193, 256},
         {16384, 256},
         {16385, 512}});
}

TEST_CASE("a grid has no more blocks than a device holds at a time") {
  constexpr int64_t kMany = 1000000;
  CHECK(row_choice<BFloat16>(kH200, 5000, true, kMany).launch.blocks == 4 * 132);
  CHECK(row_choice<BFloat16>(kH200, 5000, false, kMany).launch.blocks == 3 * 132);
  CHECK(row_choice<double>(kH200, 5000, false, kMany).launch.blocks == 2 * 132);
  CHECK(row_choice<BFloat16>(kH200, 500, false, kMany).launch.blocks == 3 * 132);
  CHECK(row_choice<BFloat16>(kH200, 500, false, 17).launch.blocks == 3);
  CHECK(row_choice<BFloat16>(kH200, 5000, true, 0).launch.blocks == 1);
}

TEST_CASE("teams keep no more than their blocks have room for") {
  const auto check = [](const DeviceRoom& room, int64_t classes, bool plain, int64_t item_size,
                        const RowChoice& it) {
    CAPTURE(room.multiprocessors, classes, plain, item_size, it.size);
    CHECK((it.work != RowWork::kGeneral) == plain);
    const auto& [blocks, kept, shared] = it.launch;
    const int resident = it.blocks_per_multiprocessor;
    CHECK(kept % it.size == 0);
    CHECK(shared == kept * it.teams * 16);
    CHECK(shared + kMostStaticShared <= room.shared_per_block);
    // The limit of every kernel is set to most_shared, for any need of this launch.
    CHECK(shared <= ampfuse::most_shared(room.shared_per_block));
    CHECK(resident * (shared + kMostStaticShared + kKiB) <= room.shared);
    if (is_held(it.work)) {
      CHECK(classes <= it.most_held);
      CHECK(kept * 8 >= classes);
    }
    CHECK(blocks <= room.multiprocessors * resident);
    // At most a whole row is kept.
    CHECK((kept - it.size) * (16 / item_size) < classes);
  };
  DeviceRoom twice = kL4;
  twice.holds_twice = true;
  for (const DeviceRoom& room : {kA100, kH200, kL4, twice}) {
    for (const int64_t classes : {1, 100, 129, 256, 257, 1024, 1025, 2048, 2049, 4096, 4097, 8192,
                                  8193, 16384, 16385, 32000, 50257, 300001}) {
      for (const bool plain : {false, true}) {
        check(room, classes, plain, 2, row_choice<BFloat16>(room, classes, plain));
        check(room, classes, plain, 4, row_choice<float>(room, classes, plain));
        check(room, classes, plain, 8, row_choice<double>(room, classes, plain));
      }
    }
  }
}

TEST_CASE("only the largest teams exceed the L2 cache with unkept parts of rows") {
  for (const DeviceRoom& room : {kA100, kH200, kL4}) {
    for (int64_t classes = 1; classes < 1000000; classes += classes / 7 + 1) {
      for (const bool plain : {false, true}) {
        CAPTURE(room.multiprocessors, classes, plain);
        const RowChoice it = row_choice<float>(room, classes, plain);
        CHECK((it.l2_holds_rest || it.size == (plain ? 1024 : 512)));
      }
    }
  }
}

TEST_CASE("static shared memory counts towards the 48 KiB that blocks always have") {
  // Eight warps have a row each and keep twelve packs per thread.
  const auto launch = row_choice<float>(kH200, 1536, /*plain=*/true).launch;
  CHECK(launch.shared == 48 * kKiB);
  CHECK(ampfuse::must_ask_for_shared(launch.shared));
  CHECK(ampfuse::must_ask_for_shared(48 * kKiB - kMostStaticShared + 1));
  CHECK_FALSE(ampfuse::must_ask_for_shared(48 * kKiB - kMostStaticShared));
  // No pack of a row is kept without a second pass.
  const auto without_grad =
      ampfuse::row_launch<float, ampfuse::WarpTeam, RowWork::kPlain>(kH200, 0, 9, false);
  CHECK(without_grad.kept == 0);
  CHECK(without_grad.shared == 0);
  CHECK(without_grad.blocks == 1);
}
