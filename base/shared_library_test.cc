#include "base/shared_library.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// The loader names only the missing library, not the library that needs it.
TEST(SharedLibraryTest, EveryReasonBeginsWithTheLibraryThatWasTried) {
  const std::vector<std::string> names = {"libnot_there.so.1", "/etc/passwd"};
  const absl::Status status =
      OpenSharedLibrary(names, LoadedCopy::kIgnore, "no GPU runtime").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              StartsWith("no GPU runtime: libnot_there.so.1: cannot open"));
  EXPECT_THAT(status.message(), HasSubstr("; /etc/passwd: "));
}

TEST(SharedLibraryTest, TakesTheFirstNameUnlessTheProcessHasAnother) {
  const std::vector<std::string> names = {"libnot_there.so.1", "libresolv.so.2", "libc.so.6"};
  const auto first = OpenSharedLibrary(names, LoadedCopy::kIgnore, "none");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->name, "libresolv.so.2");
  const std::vector<std::string> loaded = {"libnot_there.so.1", "/nowhere/libc.so.6", "libc.so.6"};
  const auto shared = OpenSharedLibrary(loaded, LoadedCopy::kShare, "none");
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->name, "libc.so.6");
}

TEST(SymbolTableTest, NamesTheFirstMissingEntryPointThatIsNeeded) {
  const std::vector<std::string> names = {"libc.so.6"};
  const auto library = OpenSharedLibrary(names, LoadedCopy::kShare, "none");
  ASSERT_TRUE(library.ok()) << library.status();
  int (*absolute)(int) = nullptr;
  int (*other)(int) = [](int) { return 0; };
  SymbolTable symbols(library->handle);
  symbols.Need("abs", &absolute);
  ASSERT_NE(absolute, nullptr);
  EXPECT_EQ(absolute(-3), 3);
  symbols.Need(nullptr, &other);  // the library is not supposed to have it
  EXPECT_EQ(other, nullptr);
  symbols.Want("no_such_function", &other);
  EXPECT_EQ(other, nullptr);
  EXPECT_TRUE(symbols.Check("libc").ok());
  symbols.Need("neither_this_one", &other);
  symbols.Need("nor_this", &other);
  EXPECT_EQ(symbols.Check("libc").message(), "libc has no entry point neither_this_one");
}

}  // namespace
}  // namespace mla
