// SPDX-License-Identifier: Apache-2.0
// BLAKE2b without a key, RFC 7693: what hashlib.blake2b(digest_size=...) computes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace nixl_planner {

class Blake2b {
 public:
  static constexpr std::size_t kMaxDigest = 64;

  // `digest_size` is in bytes, 1 to kMaxDigest.
  explicit Blake2b(std::size_t digest_size);

  void update(const std::uint8_t *data, std::size_t length);

  // Write the digest of all data so far; more may follow.
  void digest(std::uint8_t *out) const;

 private:
  static constexpr std::size_t kBlock = 128;
  using State = std::array<std::uint64_t, 8>;

  static void compress(State &state, const std::uint8_t *block, std::uint64_t counter,
                       bool last);

  std::size_t digest_size_;
  State state_;
  std::uint64_t compressed_ = 0;
  // The last block is held back, because only the end tells that it is the last.
  std::array<std::uint8_t, kBlock> pending_{};
  std::size_t pending_size_ = 0;
};

}  // namespace nixl_planner
