// Tells whether other programs compute on the core of a relay that polls.
//
// A yield returns at once on a core that no other program wants, and after a time slice of the
// other program where one computes. A sleeper, by contrast, is woken ahead of such a program. So a
// relay sleeps in place of yielding for kPause after each yield that took kLongYield or more. Only
// yields count: a look at the transport may last as long because it waits for the relay's other
// thread.
//
// Threading: one thread. It has no clock of its own.
#ifndef MLA_RELAY_CROWDING_H_
#define MLA_RELAY_CROWDING_H_

#include <chrono>
#include <optional>

namespace mla::relay {

class Crowding final {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr std::chrono::microseconds kLongYield{500};
  static constexpr std::chrono::milliseconds kPause{100};

  // Returns true if the relay is to sleep in place of yielding at `now`.
  bool IsCrowded(Time now) const { return until_.has_value() && now < *until_; }
  // Takes the begin and the end of a yield.
  void NoteYield(Time begin, Time end) {
    if (end - begin >= kLongYield) until_ = end + kPause;
  }

 private:
  std::optional<Time> until_;
};

}  // namespace mla::relay

#endif  // MLA_RELAY_CROWDING_H_
