// Which process an object belongs to, and what a fork leaves of it.
//
// A child that fork makes has copies of its parent's objects. It shares their sockets and their
// memory, and has none of their threads. So it must not use them, nor end what the parent still
// uses: calls of a copy fail, and destroying a copy ends nothing.
//
// Threading: any thread.
#ifndef MLA_CLIENT_CPP_SHARED_MEMORY_HOME_H_
#define MLA_CLIENT_CPP_SHARED_MEMORY_HOME_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::client {

// The process that made an object.
class Home final {
 public:
  Home();
  // Returns true in any other process than the one that made the object.
  bool left() const;
  int64_t pid() const { return pid_; }

 private:
  const pid_t pid_;
  const uint32_t forks_;
};

// A process makes channels of gRPC. From now on gRPC does not work in its children.
void UseGrpc();
// Returns true in a process that was forked from one that had made channels of gRPC.
bool GrpcIsBroken();

// In every child that is forked while this exists the socket is closed, so that the server sees the
// parent's end, and empty pages take the place of the memory, so that nothing that the child writes
// reaches the server.
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
