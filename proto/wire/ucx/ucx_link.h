// One connection over UCX, which carries frames: a context, a worker and an endpoint.
//
//   auto link = UcxLink::Open(api, options, &receiver);
//   (*link)->Connect(address of the peer);  // who has got (*link)->address()
//   (*link)->Send(header, payload, tag);
//   while (...) (*link)->Progress();
//
// Nothing moves without Progress, which calls the receiver.
//
// Ownership: api and receiver outlive the link. Threading: one thread at a time, the constructor
// and destructor included.
#ifndef MLA_PROTO_WIRE_UCX_UCX_LINK_H_
#define MLA_PROTO_WIRE_UCX_UCX_LINK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/wire/ucx/frame_batch.h"
#include "proto/wire/ucx/frame_seal.h"
#include "proto/wire/ucx/ucx_api.h"

namespace mla::wire {

class UcxReceiver {
 public:
  virtual ~UcxReceiver() = default;
  // Returns room for the payload of a frame, which stays valid until OnArrived or the end of the
  // link. An error refuses the frame and ends the link. `header` is valid during the call.
  virtual absl::StatusOr<std::byte*> Place(std::span<const std::byte> header,
                                           size_t payload_bytes) = 0;
  // The payload is in its place. Frames may arrive in another order than they were sent.
  virtual void OnArrived(std::span<const std::byte> header) = 0;
  // The payload of Send with this tag may be changed from now on. Must not call the link.
  virtual void OnSent(uint64_t tag) = 0;
};

struct UcxLinkOptions {
  // Values of UCX_TLS and UCX_NET_DEVICES; empty: the environment's, or UCX's choice.
  std::string transports, devices;
  // Payloads can be put into memory of the peer, and the peer's into memory of this side. UCX then
  // has handlers for remote access: over transports without keys of hardware (TCP), a peer can read
  // and write all memory of this process.
  bool puts = false;
};

// The kinds of memory that UCX tells apart.
enum class UcxMemoryKind : uint8_t { kHost, kCuda, kRocm };

// Memory of one side that the other may put payloads into.
struct UcxTarget {
  uint64_t address = 0, bytes = 0;
  std::string key;  // as UCX packs it
};

// Which of the peer's memory a payload is put into.
enum class UcxRemote : uint8_t { kArena, kDevice };

class UcxLink final {
 public:
  static constexpr size_t kMostHeaderBytes = 128;  // before it is sealed
  static constexpr size_t kMostFrames = 8192;      // messages under way in each direction
  // A put costs a round trip before its frame, so smaller payloads go with the frame.
  static constexpr size_t kLeastPutBytes = 8192;

  // UNAVAILABLE: UCX cannot start, with its reason.
  static absl::StatusOr<std::unique_ptr<UcxLink>> Open(const UcxApi& api,
                                                       const UcxLinkOptions& options,
                                                       UcxReceiver* receiver);
  // Gives the endpoint up without waiting for frames under way.
  ~UcxLink();
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  const std::string& address() const { return address_; }
  // Tells UCX of memory that will hold payloads, so that it is registered once. It must be mapped
  // until the link is destroyed. If this fails, payloads take slower ways.
  absl::Status Register(std::span<std::byte> memory);
  // Before Connect, once: frames are encrypted from now on (frame_seal.h), and others are refused.
  // `own` is this end.
  void Encrypt(const UcxSecret& secret, FrameSeal::Sender own);
  // The peer takes frames that travel together (frame_batch.h). Does nothing if UCX takes no
  // headers of that size. Links receive such frames in any case.
  void BatchFrames();
  // Call it once. The connection is made by the first frame.
  absl::Status Connect(std::string_view address);

  // `payload` must stay unchanged until OnSent(tag), which Send may call itself. REQUIRES: the
  // header has at most kMostHeaderBytes. Returns status() if the link has ended.
  absl::Status Send(std::span<const std::byte> header, std::span<const std::byte> payload,
                    uint64_t tag);
  // Frames of Send are held back from here on, and leave in as few messages as possible when
  // SendHeld was called as often as Hold. Does nothing unless BatchFrames was called.
  void Hold() { ++holds_; }
  // Returns status().
  absl::Status SendHeld();
  // Lets the peer put payloads into `memory`, which must be mapped until the link is destroyed;
  // returns what the peer's Reach needs. The key allows to write and not to read, where transports
  // have keys. Memory of a GPU is registered as `kind`, in the context that is current.
  // FAILED_PRECONDITION: this UCX does not know that kind. REQUIRES: options.puts.
  absl::StatusOr<UcxTarget> Offer(std::span<std::byte> memory,
                                  UcxMemoryKind kind = UcxMemoryKind::kHost);
  // Returns OK if UCX registers memory of this kind; FAILED_PRECONDITION names the kinds that it
  // knows.
  absl::Status Knows(UcxMemoryKind kind) const;
  // Payloads may be put into this memory of the peer from now on. INVALID_ARGUMENT: its key is too
  // long, or it has no addresses. REQUIRES: options.puts, no Encrypt, after Connect, once for each
  // `which`.
  absl::Status Reach(const UcxTarget& target, UcxRemote which = UcxRemote::kArena);
  bool reaches(UcxRemote which = UcxRemote::kArena) const { return RemoteOf(which).key != nullptr; }
  // As Send, but puts the payload at `offset` of the peer's memory, and sends the header alone once
  // it is there. Puts that come while earlier ones are on their way are waited for together.
  // `kind` is the payload's. INVALID_ARGUMENT: the peer's memory does not hold the payload.
  // REQUIRES: reaches(which).
  absl::Status Put(std::span<const std::byte> header, std::span<const std::byte> payload,
                   uint64_t offset, uint64_t tag, UcxRemote which = UcxRemote::kArena,
                   UcxMemoryKind kind = UcxMemoryKind::kHost);
  // Returns true if something has moved.
  bool Progress();
  // Becomes readable when there is something for Progress, if Arm was called and returned true.
  // False: call Progress first. -1 if UCX has no such descriptor: then sleep for short times.
  int event_descriptor() const { return event_descriptor_; }
  bool Arm();

  // Mode of UCX in which it tells of a lost peer; both ends must have the same. Without RDMA, UCX
  // before 1.15 copies all payloads in this mode, so it is off there: a lost peer then shows as
  // silence, and the user of the link has another way to notice.
  bool handles_losses() const { return handles_losses_; }
  // OK, or the reason why the link has ended.
  const absl::Status& status() const { return status_; }
  uint64_t messages_sent() const { return messages_sent_; }  // of UCX; each has a frame or more

 private:
  struct Message;
  UcxLink(const UcxApi& api, UcxReceiver* receiver);
  absl::Status Init(const UcxLinkOptions& options);
  absl::Status Check(ucs_status_t code, const char* call) const;
  void Fail(const absl::Status& status);
  absl::Status Map(std::span<std::byte> memory, unsigned access, UcxMemoryKind kind,
                   ucp_mem_h* handle);
  absl::Status SetHandler(unsigned id, ucp_am_recv_callback_t receive);
  // Sends a message of its own: one frame, or a list of them.
  absl::Status SendMessage(unsigned id, std::span<const std::byte> header,
                           std::span<const std::byte> payload, std::span<const uint64_t> tags);
  absl::Status SendBatch();
  absl::Status Post(Message* message, std::span<const std::byte> payload);
  absl::Status Flush();
  void StepFlushed();
  void OnPutStep(Message* frame);
  Message* TakeMessage(std::span<const std::byte> header);
  void Arrived(Message* message);
  void ReturnMessage(Message* message);
  // The arguments with which UCX has called a handler.
  struct Arrival {
    std::span<const std::byte> header;
    void* data;
    size_t bytes;
    bool follows;  // the payload is still with the peer, and `data` names it
    FrameSeal::Opening opening;
  };
  void Receive(Arrival arrival, bool batched);
  void ReceiveFrame(const Arrival& arrival);
  void ReceiveBatch(const Arrival& arrival);

  template <bool kBatched>
  static ucs_status_t OnMessage(void* link, const void* header, size_t header_bytes, void* data,
                                size_t bytes, const ucp_am_recv_param_t* param);
  static void OnMessageSent(void* request, ucs_status_t code, void* message);
  static void OnPayloadReceived(void* request, ucs_status_t code, size_t bytes, void* message);
  static void OnPut(void* request, ucs_status_t code, void* frame);
  static void OnFlushed(void* request, ucs_status_t code, void* link);
  static void OnPeerLost(void* link, ucp_ep_h endpoint, ucs_status_t code);

  const UcxApi api_;
  UcxReceiver* const receiver_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  std::vector<ucp_mem_h> registered_;
  std::string address_;
  int event_descriptor_ = -1;
  bool handles_losses_ = true;
  absl::Status status_;
  std::vector<std::unique_ptr<Message>> messages_;  // all
  std::vector<Message*> free_;
  uint64_t messages_sent_ = 0;
  bool batches_ = false;
  int holds_ = 0;
  // The frames that are held back: their list, their tags, the payload of the first one, and the
  // payload of the message.
  FrameBatch batch_;
  std::vector<uint64_t> batch_tags_;
  std::span<const std::byte> first_payload_, carried_;
  std::optional<FrameSeal> seals_, opens_;  // of Encrypt
  // The memory of the peer, with its key.
  struct Remote {
    ucp_rkey_h key = nullptr;
    uint64_t address = 0, bytes = 0;
  };
  const Remote& RemoteOf(UcxRemote which) const { return remotes_[static_cast<size_t>(which)]; }
  std::array<Remote, 2> remotes_;    // by UcxRemote
  std::vector<Message*> unflushed_;  // frames whose puts wait for the next flush
  std::vector<Message*> flushing_;   // and for the one that is under way
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_UCX_UCX_LINK_H_
