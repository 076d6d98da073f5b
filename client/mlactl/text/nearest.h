// Finds the word that was most likely meant by an unknown one.
#ifndef MLA_CLIENT_MLACTL_TEXT_NEAREST_H_
#define MLA_CLIENT_MLACTL_TEXT_NEAREST_H_

#include <string>
#include <vector>

namespace mla::mlactl {

// Returns the one of `known` that begins with `word`, if that is one alone; else the one that
// differs from it in the fewest letters (left out, added, changed, or swapped with the next), at
// most a third of them. Empty: none is near enough.
std::string Nearest(const std::string& word, const std::vector<std::string>& known);

// Returns "; did you mean WORD?" or nothing.
std::string DidYouMean(const std::string& word, const std::vector<std::string>& known);

}  // namespace mla::mlactl

#endif  // MLA_CLIENT_MLACTL_TEXT_NEAREST_H_
