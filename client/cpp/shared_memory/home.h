// Tells which process an object belongs to, and handles its copies after a fork.
//
// A child that fork makes has copies of its parent's objects. The child shares the parent's sockets
// and memory, and has none of its threads. So it must not use the objects, nor end anything that
// the parent still uses: calls of a copy fail, and destroying a copy ends nothing.
//
// Threading: any thread.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_HOME_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_HOME_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::client {

// Remembers which process made an object, so that a fork can be told apart.
class Home final {
 public:
  Home();
  // Returns true in any process except the one that made the object.
  bool left() const;
  int64_t pid() const { return pid_; }

 private:
  const pid_t pid_;
  const uint32_t forks_;
};

// Notes that this process makes channels of gRPC, which does not work in its children from now on.
void UseGrpc();
// Returns true in a process that was forked from one that had made channels of gRPC.
bool GrpcIsBroken();

// While this exists, the socket is closed in every forked child, so that the server notices when
// the parent ends. The child sees empty pages in place of the memory, so that its writes do not
// reach the server.
class ForkGuard final {
 public:
  // `socket` becomes -1 in a child. Both outlive this object.
  ForkGuard(int* socket, std::span<std::byte> memory);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

 private:
  friend class Guards;
  void LeaveInChild() const;

  int* const socket_;
  const std::span<std::byte> memory_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_SHARED_MEMORY_HOME_H_
