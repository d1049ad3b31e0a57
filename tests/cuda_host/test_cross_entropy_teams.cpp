// The choice of teams for rows on each device, and how much of a row they keep. No kernel is
// launched.
#include "simt/simt.h"

#include "cuda/cross_entropy_teams.cuh"

#include <torch/headeronly/util/BFloat16.h>

#include "catch.h"

using ampfuse::DeviceRoom;
using ampfuse::kMostStaticShared;
using ampfuse::RowWork;

namespace {

constexpr int64_t kKiB = 1024;
const DeviceRoom kA100 = {108, 164 * kKiB, 163 * kKiB, 40 * kKiB * kKiB, 0};
const DeviceRoom kH200 = {132, 228 * kKiB, 227 * kKiB, 50 * kKiB * kKiB, 31};
const DeviceRoom kL4 = {58, 100 * kKiB, 99 * kKiB, 48 * kKiB * kKiB, 0};

// Returns the size of the team that processes rows.
template <typename scalar_t>
int team_size(const DeviceRoom& room, int64_t classes, bool plain) {
  int size = 0;
  ampfuse::for_forward_rows<scalar_t>(room, classes, plain, [&]<typename Team, RowWork kWork>() {
    CHECK((kWork != RowWork::kGeneral) == plain);
    if constexpr (kWork == RowWork::kHeld) {
      CHECK(classes <= ampfuse::HeldRow<scalar_t, Team>::kMostClasses);
    }
    size = Team::kSize;
  });
  return size;
}

}  // namespace

TEST_CASE("longer rows have larger teams") {
  using c10::BFloat16;
  CHECK(team_size<BFloat16>(kH200, 128, false) == 32);
  CHECK(team_size<BFloat16>(kH200, 4096, false) == 32);
  CHECK(team_size<BFloat16>(kH200, 4097, false) == 256);
  // A row of 64 KB fits in a third of shared memory.
  CHECK(team_size<BFloat16>(kH200, 32000, false) == 256);
  CHECK(team_size<BFloat16>(kH200, 50257, false) == 512);
  // Each thread of a team that holds its row has at most 32 logits.
  const std::pair<int, int> held[] = {{1, 8},      {256, 8},    {257, 32},   {1024, 32},
                                      {1025, 64},  {2048, 64},  {2049, 128}, {4097, 256},
                                      {8193, 512}, {16384, 512}};
  for (const auto& [classes, size] : held) CHECK(team_size<BFloat16>(kH200, classes, true) == size);
  CHECK(team_size<float>(kH200, 128, true) == 8);
  CHECK(team_size<float>(kH200, 2048, true) == 32);
  CHECK(team_size<float>(kH200, 2049, true) == 256);
  DeviceRoom without_clusters = kH200;
  without_clusters.clusters = 0;
  CHECK(team_size<BFloat16>(without_clusters, 16385, true) == 512);
  CHECK(team_size<BFloat16>(without_clusters, 50257, true) == 512);
  // 264 blocks that do not keep 85 KB each need 22 MB of the L2 cache; with 144 KB it is too much.
  CHECK(team_size<BFloat16>(without_clusters, 100000, true) == 512);
  CHECK(team_size<BFloat16>(without_clusters, 128256, true) == 1024);
  CHECK(team_size<float>(kH200, 50000, true) == 512);
  CHECK(team_size<float>(kH200, 64128, true) == 1024);
  CHECK(team_size<BFloat16>(kH200, 131073, true) == 1024);
  CHECK(team_size<BFloat16>(kH200, 256000, false) == 512);
  CHECK(team_size<double>(kH200, 256000, true) == 256);
}

TEST_CASE("clusters hold rows that are too long for one block, on GPUs that have clusters") {
  using c10::BFloat16;
  const auto blocks_of_row = [](const DeviceRoom& room, int64_t rows, int64_t classes) {
    std::pair<int, int> blocks = {0, 0};
    ampfuse::for_plain_rows<BFloat16>(room, classes, [&]<typename Team, RowWork kWork>() {
      if (Team::kMostBlocks == 1) return;
      const auto launch =
          ampfuse::row_launch<BFloat16, Team, kWork>(room, rows, classes, /*with_grad=*/true);
      blocks = {launch.cluster, launch.blocks};
    });
    return blocks;
  };
  const std::pair<int, int> no_cluster = {0, 0};
  CHECK(blocks_of_row(kH200, 10000, 16384) == no_cluster);
  CHECK(blocks_of_row(kH200, 10000, 16385) == std::pair(2, 62));
  CHECK(blocks_of_row(kH200, 10000, 32768) == std::pair(2, 62));
  CHECK(blocks_of_row(kH200, 10000, 50257) == std::pair(4, 124));
  CHECK(blocks_of_row(kH200, 10000, 128256) == std::pair(8, 248));
  CHECK(blocks_of_row(kH200, 10000, 131072) == std::pair(8, 248));
  CHECK(blocks_of_row(kH200, 0, 131072) == std::pair(8, 8));
  CHECK(blocks_of_row(kH200, 10000, 131073) == no_cluster);
  CHECK(blocks_of_row(kH200, 3, 50257) == std::pair(4, 12));
  CHECK(blocks_of_row(kA100, 10000, 50257) == no_cluster);
}

TEST_CASE("a grid has no more blocks than a device holds at a time") {
  using ampfuse::resident_blocks;
  using c10::BFloat16;
  using Block = ampfuse::BlockTeam<256>;
  constexpr int64_t kMany = 1000000;
  CHECK(resident_blocks<BFloat16, Block, RowWork::kPlain>(132, kMany) == 4 * 132);
  CHECK(resident_blocks<BFloat16, Block, RowWork::kGeneral>(132, kMany) == 3 * 132);
  CHECK(resident_blocks<double, Block, RowWork::kGeneral>(132, kMany) == 2 * 132);
  CHECK(resident_blocks<BFloat16, ampfuse::WarpTeam, RowWork::kGeneral>(132, kMany) == 3 * 132);
  CHECK(resident_blocks<BFloat16, ampfuse::WarpTeam, RowWork::kGeneral>(132, 17) == 3);
  CHECK(resident_blocks<BFloat16, Block, RowWork::kPlain>(132, 0) == 1);
}

TEMPLATE_TEST_CASE("teams keep no more than their blocks have room for", "", c10::BFloat16, float,
                   double) {
  for (const DeviceRoom& room : {kA100, kH200, kL4}) {
    for (const int64_t classes :
         {1,    8,    100,  129,  256,   257,   1000,  1024,  1025,  2048,  2049,
          4096, 4097, 8192, 8193, 10000, 16384, 16385, 32000, 50257, 300001}) {
      for (const bool plain : {false, true}) {
        CAPTURE(room.multiprocessors, classes, plain, sizeof(TestType));
        const auto check = [&]<typename Team, RowWork kWork>() {
          constexpr int kBlocks = ampfuse::kRowBlocks<kWork, TestType, Team>;
          const auto launch =
              ampfuse::row_launch<TestType, Team, kWork>(room, 10000, classes, true);
          CHECK(launch.kept % Team::kSize == 0);
          CHECK(launch.shared == launch.kept * Team::kTeams * 16);
          CHECK(launch.shared + kMostStaticShared <= room.shared_per_block);
          // The limit of every kernel is set to most_shared, for any need of this launch.
          CHECK(launch.shared <= ampfuse::most_shared(room.shared_per_block));
          CHECK(kBlocks * (launch.shared + kMostStaticShared + kKiB) <= room.shared);
          if (kWork == RowWork::kHeld) CHECK(launch.kept * 8 * launch.cluster >= classes);
          CHECK(launch.blocks % launch.cluster == 0);
          if (Team::kMostBlocks > 1) CHECK_FALSE(ampfuse::must_ask_for_shared(launch.shared));
          CHECK(launch.blocks <= room.multiprocessors * kBlocks);
          // At most a whole row is kept.
          CHECK((launch.kept - Team::kSize) * int64_t(16 / sizeof(TestType)) * launch.cluster <
                classes);
        };
        ampfuse::for_forward_rows<TestType>(room, classes, plain, check);
      }
    }
  }
}

TEST_CASE("only the largest teams exceed the L2 cache with unkept parts of rows") {
  for (const DeviceRoom& room : {kA100, kH200, kL4}) {
    for (int64_t classes = 1; classes < 1000000; classes += classes / 7 + 1) {
      for (const bool plain : {false, true}) {
        CAPTURE(room.multiprocessors, classes, plain);
        const auto check = [&]<typename Team, RowWork kWork>() {
          if (Team::kSize == (plain ? 1024 : 512)) return;
          CHECK(ampfuse::TeamRoom<float, Team, kWork>{room}.l2_holds_rest(classes * 4));
        };
        ampfuse::for_forward_rows<float>(room, classes, plain, check);
      }
    }
  }
}

TEST_CASE("static shared memory counts towards the 48 KiB that blocks always have") {
  // Eight warps have a row each and keep twelve packs per thread.
  const auto launch =
      ampfuse::row_launch<float, ampfuse::WarpTeam, RowWork::kPlain>(kH200, 9, 1536, true);
  CHECK(launch.shared == 48 * kKiB);
  CHECK(ampfuse::must_ask_for_shared(launch.shared));
  CHECK(ampfuse::must_ask_for_shared(48 * kKiB - kMostStaticShared + 1));
  CHECK_FALSE(ampfuse::must_ask_for_shared(48 * kKiB - kMostStaticShared));
}

TEST_CASE("no pack of a row is kept without a second pass") {
  const auto launch =
      ampfuse::row_launch<float, ampfuse::WarpTeam, RowWork::kPlain>(kH200, 0, 9, false);
  CHECK(launch.kept == 0);
  CHECK(launch.shared == 0);
  CHECK(launch.blocks == 1);
}
