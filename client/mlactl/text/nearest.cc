#include "client/mlactl/text/nearest.h"

#include <algorithm>
#include <cstddef>

namespace mla::mlactl {
namespace {

constexpr size_t kMostLetters = 64;  // of a word that is looked at
constexpr size_t kLettersPerDifference = 3;

// Returns the number of edits that turn `a` into `b`, where a swap of neighbours counts as one.
size_t Differences(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) cost[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) cost[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = a[i - 1] == b[j - 1] ? 0 : 1;
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

}  // namespace

std::string Nearest(const std::string& word, const std::vector<std::string>& known) {
  if (word.empty() || word.size() > kMostLetters) return "";
  std::vector<std::string> longer;
  for (const std::string& one : known) {
    if (one.rfind(word, 0) == 0) longer.push_back(one);
  }
  if (longer.size() == 1) return longer[0];
  std::string best;
  size_t least = std::max<size_t>(word.size() / kLettersPerDifference, 1) + 1;
  for (const std::string& one : known) {
    const size_t differences = Differences(word, one);
    if (differences < least) {
      least = differences;
      best = one;
    }
  }
  return best;
}

std::string DidYouMean(const std::string& word, const std::vector<std::string>& known) {
  const std::string near = Nearest(word, known);
  return near.empty() || near == word ? "" : "; did you mean " + near + "?";
}

}  // namespace mla::mlactl
