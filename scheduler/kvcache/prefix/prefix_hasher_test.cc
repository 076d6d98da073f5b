#include "scheduler/kvcache/prefix/prefix_hasher.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace mla::kvcache {
namespace {

PrefixSecret SecretOf(int first) {
  PrefixSecret secret;
  for (size_t i = 0; i < secret.size(); ++i)
    secret[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return secret;
}

PrefixChain ChainOf(const PrefixHasher& hasher, const std::vector<uint32_t>& tokens) {
  PrefixChain chain;
  chain.page_size = 4;
  const absl::string_view fields[] = {"tenant", "model"};
  chain.root = hasher.Root(fields);
  hasher.AddTokens(tokens, &chain);
  return chain;
}

std::vector<uint32_t> Tokens(int count) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 100u);
  return tokens;
}

// The output for 0 bytes of input is the first vector that the algorithm's authors published for
// 128 bits.
TEST(PrefixHasherTest, IsSipHashOf128Bits) {
  const PrefixKey key = PrefixHasher(SecretOf(0)).Root({});
  EXPECT_EQ(key.high, 0xe6a825ba047f81a3u);
  EXPECT_EQ(key.low, 0x930255c71472f66du);
}

TEST(PrefixHasherTest, WholePagesHaveKeys) {
  const PrefixHasher hasher(SecretOf(1));
  const PrefixChain chain = ChainOf(hasher, Tokens(11));
  EXPECT_EQ(chain.keys.size(), 2u);
  EXPECT_EQ(chain.rows(), 11);
  EXPECT_EQ(chain.parent(0), chain.root);
  EXPECT_EQ(chain.parent(2), chain.keys[1]);
}

TEST(PrefixHasherTest, AddingInPiecesIsAddingAtOnce) {
  const PrefixHasher hasher(SecretOf(1));
  const std::vector<uint32_t> tokens = Tokens(37);
  PrefixChain pieces = ChainOf(hasher, {});
  for (const uint32_t token : tokens) hasher.AddTokens({&token, 1}, &pieces);
  EXPECT_EQ(pieces.keys, ChainOf(hasher, tokens).keys);
}

TEST(PrefixHasherTest, KeysDependOnAllBeforeThem) {
  const PrefixHasher hasher(SecretOf(1));
  std::vector<uint32_t> tokens = Tokens(12);
  const PrefixChain chain = ChainOf(hasher, tokens);
  for (size_t changed = 0; changed < tokens.size(); ++changed) {
    std::vector<uint32_t> others = tokens;
    others[changed] ^= 1;
    const PrefixChain other = ChainOf(hasher, others);
    for (size_t page = 0; page < 3; ++page) {
      EXPECT_EQ(chain.keys[page] == other.keys[page], page < changed / 4) << changed;
    }
  }
}

TEST(PrefixHasherTest, OtherSecretsAndFieldsGiveOtherKeys) {
  const PrefixHasher hasher(SecretOf(1));
  const absl::string_view one[] = {"ab", "c"}, two[] = {"a", "bc"}, three[] = {"abc"};
  EXPECT_NE(hasher.Root(one), hasher.Root(two));
  EXPECT_NE(hasher.Root(one), hasher.Root(three));
  EXPECT_NE(hasher.Root(one), PrefixHasher(SecretOf(2)).Root(one));
  EXPECT_EQ(hasher.Root(one), PrefixHasher(SecretOf(1)).Root(one));
}

TEST(PrefixHasherTest, PagesMayBeNamedByKeys) {
  const PrefixHasher hasher(SecretOf(1));
  const std::string a(PrefixHasher::kPageKeyBytes, 'a'), b(PrefixHasher::kPageKeyBytes, 'b');
  PrefixChain one = ChainOf(hasher, {}), two = one;
  const std::string ab[] = {a, b}, bb[] = {b, b};
  hasher.AddPageKeys(ab, &one);
  hasher.AddPageKeys(bb, &two);
  EXPECT_TRUE(one.opaque);
  EXPECT_EQ(one.rows(), 8);
  EXPECT_NE(one.keys[0], two.keys[0]);
  EXPECT_NE(one.keys[1], two.keys[1]);  // the same key after another page
}

}  // namespace
}  // namespace mla::kvcache
