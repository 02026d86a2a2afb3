// SPDX-License-Identifier: Apache-2.0
#include "blake2b.h"

#include <algorithm>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory, which must be little-endian"
#endif

namespace nixl_planner {
namespace {

constexpr std::array<std::uint64_t, 8> kStart = {
    0x6a09e667f3bcc908U, 0xbb67ae8584caa73bU, 0x3c6ef372fe94f82bU, 0xa54ff53a5f1d36f1U,
    0x510e527fade682d1U, 0x9b05688c2b3e6c1fU, 0x1f83d9abfb41bd6bU, 0x5be0cd19137e2179U};

constexpr unsigned kRounds = 12;
constexpr std::uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline std::uint64_t rotate(std::uint64_t word, unsigned bits) {
  return (word >> bits) | (word << (64 - bits));
}

inline void mix(std::uint64_t &a, std::uint64_t &b, std::uint64_t &c, std::uint64_t &d,
                std::uint64_t x, std::uint64_t y) {
  a += b + x;
  d = rotate(d ^ a, 32);
  c += d;
  b = rotate(b ^ c, 24);
  a += b + y;
  d = rotate(d ^ a, 16);
  c += d;
  b = rotate(b ^ c, 63);
}

// The order of words is a template argument so that it costs no look-up.
template <unsigned Round>
inline void mix_round(std::uint64_t (&v)[16], const std::uint64_t (&m)[16]) {
  constexpr const std::uint8_t(&s)[16] = kOrder[Round % 10];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  if constexpr (Round + 1 < kRounds) mix_round<Round + 1>(v, m);
}

}  // namespace

Blake2b::Blake2b(std::size_t digest_size) : digest_size_(digest_size), state_(kStart) {
  // Parameter block: no key, fan-out and depth 1.
  state_[0] ^= 0x01010000U ^ digest_size;
}

void Blake2b::update(const std::uint8_t *data, std::size_t length) {
  while (length > 0) {
    if (pending_size_ == kBlock) {
      compressed_ += kBlock;
      compress(state_, pending_.data(), compressed_, false);
      pending_size_ = 0;
    }
    if (pending_size_ == 0) {
      for (; length > kBlock; data += kBlock, length -= kBlock) {
        compressed_ += kBlock;
        compress(state_, data, compressed_, false);
      }
    }
    const std::size_t part = std::min(length, kBlock - pending_size_);
    std::memcpy(pending_.data() + pending_size_, data, part);
    pending_size_ += part;
    data += part;
    length -= part;
  }
}

void Blake2b::digest(std::uint8_t *out) const {
  State state = state_;
  std::array<std::uint8_t, kBlock> last{};
  std::copy_n(pending_.begin(), pending_size_, last.begin());
  compress(state, last.data(), compressed_ + pending_size_, true);
  std::memcpy(out, state.data(), digest_size_);
}

void Blake2b::compress(State &state, const std::uint8_t *block, std::uint64_t counter,
                       bool last) {
  std::uint64_t words[16];
  std::memcpy(words, block, sizeof words);
  std::uint64_t v[16];
  std::copy(state.begin(), state.end(), v);
  std::copy(kStart.begin(), kStart.end(), v + 8);
  v[12] ^= counter;
  if (last) v[14] = ~v[14];
  mix_round<0>(v, words);
  for (std::size_t i = 0; i < state.size(); ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace nixl_planner
