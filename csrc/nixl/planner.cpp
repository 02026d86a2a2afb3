// SPDX-License-Identifier: Apache-2.0
#include "planner.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>

namespace nixl_planner {
namespace {

// Below this, counting digits costs more than comparing.
constexpr std::size_t kInsertionSort = 48;

bool in_range(const std::int32_t *ids, std::size_t length, std::int64_t count,
              OutOfRange &wrong) {
  if (length == 0) return true;
  std::int32_t lowest = ids[0];
  std::int32_t highest = ids[0];
  for (std::size_t i = 1; i < length; ++i) {
    lowest = std::min(lowest, ids[i]);
    highest = std::max(highest, ids[i]);
  }
  wrong.lowest = lowest;
  wrong.highest = highest;
  return lowest >= 0 && highest < count;
}

void insertion_sort(std::int32_t *local, std::int32_t *remote, std::size_t blocks) {
  for (std::size_t i = 1; i < blocks; ++i) {
    const std::int32_t mine = local[i];
    const std::int32_t theirs = remote[i];
    std::size_t j = i;
    for (; j > 0 && local[j - 1] > mine; --j) {
      local[j] = local[j - 1];
      remote[j] = remote[j - 1];
    }
    local[j] = mine;
    remote[j] = theirs;
  }
}

// By digits of eight bits, lowest first; no id is negative.
void radix_sort(std::int32_t *local, std::int32_t *remote, std::size_t blocks) {
  const auto highest =
      static_cast<std::uint32_t>(*std::max_element(local, local + blocks));
  std::vector<std::int32_t> next(2 * blocks);
  for (unsigned shift = 0; shift < 32 && (highest >> shift) != 0; shift += 8) {
    const auto digit = [shift](std::int32_t id) {
      return (static_cast<std::uint32_t>(id) >> shift) & 0xFFU;
    };
    std::array<std::size_t, 256> place{};
    for (std::size_t i = 0; i < blocks; ++i) ++place[digit(local[i])];
    std::size_t sum = 0;
    for (std::size_t &entry : place) {
      const std::size_t count = entry;
      entry = sum;
      sum += count;
    }
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t to = place[digit(local[i])]++;
      next[to] = local[i];
      next[blocks + to] = remote[i];
    }
    std::copy_n(next.data(), blocks, local);
    std::copy_n(next.data() + blocks, blocks, remote);
  }
}

// Most tables are in order already, or run strictly downwards because they come from
// a free list.
void sort_pairs(const Table &table) {
  const std::int32_t *end = table.local + table.blocks;
  if (std::is_sorted(table.local, end, std::greater_equal<std::int32_t>())) {
    std::reverse_copy(table.local, end, table.local_out);
    std::reverse_copy(table.remote, table.remote + table.blocks, table.remote_out);
    return;
  }
  std::copy_n(table.local, table.blocks, table.local_out);
  std::copy_n(table.remote, table.blocks, table.remote_out);
  if (std::is_sorted(table.local_out, table.local_out + table.blocks)) return;
  if (table.blocks <= kInsertionSort) {
    insertion_sort(table.local_out, table.remote_out, table.blocks);
  } else {
    radix_sort(table.local_out, table.remote_out, table.blocks);
  }
}

std::int32_t count_runs(const std::int32_t *local, const std::int32_t *remote,
                        std::size_t length) {
  std::int32_t runs = 1;
  for (std::size_t i = 1; i < length; ++i) {
    // No id is negative, so the differences cannot overflow.
    runs += (local[i] - local[i - 1] != 1) | (remote[i] - remote[i - 1] != 1);
  }
  return runs;
}

}  // namespace

bool pair_tables(const std::vector<Table> &tables, std::int64_t local_count,
                 std::int64_t remote_count, OutOfRange &wrong) {
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const Table &table = tables[i];
    wrong.table = i;
    wrong.is_remote = false;
    if (!in_range(table.local, table.blocks, local_count, wrong)) return false;
    wrong.is_remote = true;
    if (!in_range(table.remote, table.blocks, remote_count, wrong)) return false;
  }
  for (const Table &table : tables) {
    sort_pairs(table);
    std::int32_t *runs = table.runs;
    for (std::size_t start = 0; start < table.blocks; start += table.step) {
      *runs++ = count_runs(table.local_out + start, table.remote_out + start,
                           std::min(table.step, table.blocks - start));
    }
  }
  return true;
}

void expand(const std::int32_t *__restrict ids, std::size_t blocks,
            const std::int32_t *regions, std::size_t regions_count, std::int64_t pages,
            std::int32_t *__restrict out) {
  for (std::size_t r = 0; r < regions_count; ++r, out += blocks) {
    // The caller has seen to it that indices fit; unsigned, a wrong one is no undefined
    // behaviour.
    const auto base =
        static_cast<std::uint32_t>(static_cast<std::uint64_t>(regions[r]) *
                                   static_cast<std::uint64_t>(pages));
    for (std::size_t i = 0; i < blocks; ++i) {
      out[i] = static_cast<std::int32_t>(base + static_cast<std::uint32_t>(ids[i]));
    }
  }
}

}  // namespace nixl_planner
