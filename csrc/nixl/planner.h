// SPDX-License-Identifier: Apache-2.0
// From two block tables to the descriptor indices of NIXL transfers. The numpy
// version in nixl/plan.py is the reference; both give the same numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nixl_planner {

// The block tables of one KV cache group, of `blocks` entries each, and where the
// paired ones go. `step` blocks make a piece; `runs` has one entry per piece.
struct Table {
  const std::int32_t *local;
  const std::int32_t *remote;
  std::size_t blocks;
  std::size_t step;
  std::int32_t *local_out;
  std::int32_t *remote_out;
  std::int32_t *runs;
};

// Which table has an id that its side lacks, and what its ids reach from and to.
struct OutOfRange {
  std::size_t table;
  bool is_remote;
  std::int32_t lowest;
  std::int32_t highest;
};

// Fill the outputs of all tables: the pairs in stable order of the local id, and how
// many runs of neighbours on both sides a piece has. False where an id is out of
// range: then `wrong` is set and the outputs are undefined.
bool pair_tables(const std::vector<Table> &tables, std::int64_t local_count,
                 std::int64_t remote_count, OutOfRange &wrong);

// Write, region by region, the index of each block in a list of `pages` per region.
void expand(const std::int32_t *ids, std::size_t blocks, const std::int32_t *regions,
            std::size_t regions_count, std::int64_t pages, std::int32_t *out);

}  // namespace nixl_planner
