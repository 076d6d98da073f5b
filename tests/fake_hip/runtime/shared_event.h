// The fake runtime's events that other processes open. An event is two counters in memory that both
// processes map.
#ifndef MLA_TESTS_FAKE_HIP_RUNTIME_SHARED_EVENT_H_
#define MLA_TESTS_FAKE_HIP_RUNTIME_SHARED_EVENT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace mla::fake_hip {

using SharedHandle = std::array<char, 64>;

class SharedEvent {
 public:
  // Return null if the system refuses, or if the event does not exist.
  static std::unique_ptr<SharedEvent> Make();
  static std::unique_ptr<SharedEvent> Open(const SharedHandle& handle);
  ~SharedEvent();

  SharedHandle handle() const;
  void Record() { ++state_->recorded; }
  void Complete() { state_->completed = state_->recorded.load(); }
  bool Done() const { return state_->completed == state_->recorded; }

 private:
  struct State {
    std::atomic<uint64_t> recorded, completed;
  };
  SharedEvent(std::string name, State* state, bool owner)
      : name_(std::move(name)), state_(state), owner_(owner) {}
  static std::unique_ptr<SharedEvent> Map(const std::string& name, int descriptor, bool owner);

  const std::string name_;
  State* const state_;
  const bool owner_;
};

}  // namespace mla::fake_hip

#endif  // MLA_TESTS_FAKE_HIP_RUNTIME_SHARED_EVENT_H_
