// Makes device kernels wrong one at a time, each in a forked process that shares the earlier work.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_WRONG_KERNELS_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_WRONG_KERNELS_H_

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/fake_hip/runtime/fake_control.h"

namespace mla::kernels::hip {

// While an object of this class lives, the first launch of each kernel forks a process in which
// that kernel computes nothing from then on. All processes share the earlier, correct launches,
// because a self-test takes seconds on the emulated device. Only one object may live at a time, and
// the process must have one thread.
class WrongKernels {
 public:
  // Tries the kernels in `tried`, or every launched kernel if the set is empty.
  explicit WrongKernels(fake_hip::Control* control, std::set<std::string> tried = {})
      : control_(control), tried_(std::move(tried)) {
    living_ = this;
    control_->wrong_results = true;
    control_->wrong_kernel = "none of them";
    control_->before_launch = [](const char* kernel) { living_->BeforeLaunch(kernel); };
  }
  ~WrongKernels() {
    control_->before_launch = nullptr;
    living_ = nullptr;
  }
  WrongKernels(const WrongKernels&) = delete;
  WrongKernels& operator=(const WrongKernels&) = delete;

  // Ends a forked process. Its kernel counts as noticed if `noticed` returns true and no
  // expectation has failed. In the process with correct kernels, this returns at once.
  void EndForked(const std::function<bool()>& noticed) const {
    if (!forked_) return;
    const bool as_expected = noticed() && !::testing::Test::HasFailure();
    if (!as_expected) std::cerr << "wrong kernel: " << control_->wrong_kernel << std::endl;
    _exit(as_expected ? 0 : 1);
  }

  // Returns each tried kernel that was launched, and whether its flaw was noticed.
  const std::map<std::string, bool>& noticed() const { return noticed_; }

 private:
  void BeforeLaunch(const char* kernel) {
    if (forked_ || noticed_.contains(kernel) || (!tried_.empty() && !tried_.contains(kernel))) {
      return;
    }
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      forked_ = true;
      control_->wrong_kernel = kernel;
      return;
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    noticed_[kernel] = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  static inline WrongKernels* living_ = nullptr;  // before_launch has no argument to pass it
  fake_hip::Control* const control_;
  const std::set<std::string> tried_;
  bool forked_ = false;
  std::map<std::string, bool> noticed_;
};

}  // namespace mla::kernels::hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_WRONG_KERNELS_H_
