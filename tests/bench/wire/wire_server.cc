#include "tests/bench/wire/wire_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/testing/allocation_counter.h"
#include "proto/wire/grpc_tuning.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "server/attend/attention_service.h"
#include "server/control/admin_service.h"
#include "server/control/sequence_service.h"
#include "server/grpc/completion_poller.h"
#include "server/grpc/stream_call.h"
#include "server/logging/logging.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "server/tracing/tracer.h"
#include "tests/bench/wire/null_backend.h"
#include "tests/bench/wire/parallel_touch.h"

namespace mla::bench {
namespace {

// NullBackend that reads its inputs and writes its outputs, if asked to.
class TouchingBackend final : public NullBackend {
 public:
  TouchingBackend(const Shared* shared, ParallelTouch* team)
      : shared_(shared), team_(*team), info_(NullBackend::Info()) {
    info_.reads_fragments = true;
  }
  const kernels::BackendInfo& Info() const override { return info_; }
  absl::Status Submit(int32_t, const kernels::Launch& launch) override {
    if (shared_->touch.load() == 0) return absl::OkStatus();
    for (const kernels::HostInput& in : launch.inputs) {
      sum_ += team_.Sum(in.host, static_cast<uint64_t>(in.rows * in.row_bytes));
    }
    pieces_.clear();
    for (const kernels::FragmentedInput& input : launch.absorbed.q_fragments) AddPieces(input);
    for (const kernels::FragmentedInput& input : launch.expanded.q_fragments) AddPieces(input);
    for (const kernels::FragmentedInput& input : launch.absorb.fragments) AddPieces(input);
    if (!pieces_.empty()) sum_ += team_.SumPieces(pieces_);
    for (const kernels::HostOutput& out : launch.outputs) {
      team_.Fill(out.host, static_cast<uint64_t>(out.rows * out.row_bytes), 1);
    }
    return absl::OkStatus();
  }

 private:
  // Adds the pieces of an input in fragments; adjacent fragments make one piece.
  void AddPieces(const kernels::FragmentedInput& input) {
    const int64_t end = input.offset + input.bytes;
    for (size_t i = 0; i < input.fragments.size(); ++i) {
      const int64_t begin = input.fragments[i].begin;
      const int64_t next = i + 1 < input.fragments.size() ? input.fragments[i + 1].begin : end;
      const int64_t from = std::max(begin, input.offset), to = std::min(next, end);
      if (from >= to) continue;
      const std::byte* const piece = input.fragments[i].data + (from - begin);
      if (!pieces_.empty() && pieces_.back().data() + pieces_.back().size() == piece) {
        pieces_.back() = {pieces_.back().data(),
                          pieces_.back().size() + static_cast<size_t>(to - from)};
      } else {
        pieces_.emplace_back(piece, static_cast<size_t>(to - from));
      }
    }
  }

  const Shared* const shared_;
  ParallelTouch& team_;
  kernels::BackendInfo info_;
  std::vector<ParallelTouch::Piece> pieces_;
  uint64_t sum_ = 0;
};

// Answers every message with as many bytes as its first eight bytes say, from memory of its own.
class BareCall final : public server::StreamHandler {
 public:
  // `reply` outlives gRPC's sending of it.
  BareCall(std::unique_ptr<server::StreamCall> call, const Shared* shared, ParallelTouch* team,
           std::vector<char>* reply)
      : call_(std::move(call)),
        unary_(call_->context().method() == kBareUnary),
        shared_(shared),
        team_(*team),
        reply_(*reply) {
    call_->Serve(this);
    call_->StartRead(&incoming_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return call_->Finish(grpc::Status::OK);
    slices_.clear();
    if (!incoming_.Dump(&slices_).ok()) return call_->Finish(grpc::Status::CANCELLED);
    // A fragment may have any length, even less than eight bytes.
    uint64_t reply_bytes = 0;
    size_t known = 0;
    for (const grpc::Slice& slice : slices_) {
      const size_t more = std::min(sizeof(reply_bytes) - known, slice.size());
      std::memcpy(reinterpret_cast<char*>(&reply_bytes) + known, slice.begin(), more);
      known += more;
    }
    reply_bytes = std::min<uint64_t>(reply_bytes, reply_.size());
    if (shared_->touch.load() != 0) {
      pieces_.clear();
      for (const grpc::Slice& slice : slices_) {
        pieces_.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
      }
      sum_ += team_.SumPieces(pieces_);
      team_.Fill(reply_.data(), reply_bytes, 1);
    }
    const grpc::Slice slice(reply_.data(), reply_bytes, grpc::Slice::STATIC_SLICE);
    const grpc::ByteBuffer outgoing(&slice, 1);
    if (unary_) {
      call_->WriteAndFinish(outgoing, grpc::Status::OK);
    } else {
      call_->StartWrite(outgoing);
    }
  }
  void OnWriteDone(bool ok) override {
    slices_.clear();
    incoming_.Clear();
    if (!ok) return call_->Finish(grpc::Status::CANCELLED);
    call_->StartRead(&incoming_);
  }
  void OnCancel() override {}
  void OnDone() override { delete this; }

 private:
  const std::unique_ptr<server::StreamCall> call_;
  const bool unary_;
  const Shared* const shared_;
  ParallelTouch& team_;
  std::vector<ParallelTouch::Piece> pieces_;
  grpc::ByteBuffer incoming_;
  std::vector<grpc::Slice> slices_;
  std::vector<char>& reply_;
  uint64_t sum_ = 0;
};

// The methods without any logic.
class BareService final {
 public:
  BareService(const Shared* shared, ParallelTouch* team) : shared_(shared), team_(team) {}
  grpc::AsyncGenericService* service() { return &service_; }
  void Serve(server::CompletionPoller* poller) {
    calls_.emplace(
        poller,
        [this](server::StreamCall* call, server::CompletionPoller* its_poller, void* tag) {
          service_.RequestCall(&call->context(), &call->stream(), its_poller->queue(),
                               its_poller->queue(), tag);
        },
        [this](std::unique_ptr<server::StreamCall> call) {
          new BareCall(std::move(call), shared_, team_, &reply_);
        });
    calls_->Start();
  }

 private:
  const Shared* const shared_;
  ParallelTouch* const team_;
  grpc::AsyncGenericService service_;
  std::vector<char> reply_ = std::vector<char>(kMessageBytes);  // one request at a time
  std::optional<server::StreamAcceptor> calls_;
};

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "wire_benchmark server: %s\n", status.ToString().c_str());
  std::abort();
}

scheduler::EngineOptions Options(scheduler::EngineObserver* observer) {
  scheduler::EngineOptions options;
  options.limits.kv_cache_bytes = int64_t{1} << 40;  // nothing is stored
  options.limits.weights_bytes = int64_t{1} << 40;
  options.limits.sequence_lease_ms = options.limits.max_lease_ms;
  options.limits.step_lease_ms = 60000;
  options.inline_work = INT64_MAX;  // a launch that computes nothing always counts as small
  options.observer = observer;
  return options;
}

// The model, with weights that are never read.
void AddModel(scheduler::Engine& engine, uint32_t layers) {
  scheduler::ModelSpec spec;
  spec.id = kModel;
  spec.geometry = {kHeads, kLora, kRope, kNope, kV};
  spec.layers = static_cast<int32_t>(layers);
  spec.softmax_scale = 0.1F;
  if (auto made = engine.RegisterModel("default", spec); !made.ok()) Die(made.status());
  const std::vector<std::byte> weights(size_t{kHeads} * kLora * (kNope + kV) * 2);
  for (uint32_t layer = 0; layer < layers; ++layer) {
    absl::Status status =
        engine.LoadWeights("default", kModel, 1, static_cast<int32_t>(layer), 0, kHeads, weights);
    if (!status.ok()) Die(status);
  }
  auto missing = engine.CommitWeights("default", kModel, 1);
  if (!missing.ok()) Die(missing.status());
}

std::unique_ptr<server::SharedMemoryListener> OpenListener(const server::WireContext& wire,
                                                           const server::Config::Shm& shm,
                                                           const std::string& path) {
  server::SharedMemoryListenerOptions listener;
  listener.engine = wire.engine;
  listener.regions = wire.regions;
  listener.metrics = wire.metrics;
  listener.pool = wire.pool;
  listener.boot_id = wire.boot_id;
  listener.tracer = wire.tracer;
  listener.path = path;
  listener.shm = shm;
  auto opened = server::SharedMemoryListener::Open(std::move(listener));
  if (!opened.ok()) Die(opened.status());
  return *std::move(opened);
}

// Drops every span, so that only the cost of making them is measured.
class NoExporter final : public server::SpanExporter {
 public:
  absl::Status Export(const std::vector<server::TraceSpan>&) override { return absl::OkStatus(); }
};

std::unique_ptr<server::Tracer> MakeTracer(int32_t every) {
  std::vector<std::unique_ptr<server::SpanExporter>> exporters;
  if (every > 0) exporters.push_back(std::make_unique<NoExporter>());
  return std::make_unique<server::Tracer>(
      server::TracerOptions{
          .sample_every = every, .traces_per_s = 1000000, .tenant_traces_per_s = 1000000},
      std::move(exporters));
}

}  // namespace

void Serve(const std::string& folder, Shared* shared, uint32_t layers) {
  server::ConfigureLogging("text", "error");
  scheduler::RealClock clock;
  ParallelTouch team(shared->touch_threads, &shared->touch);
  server::Metrics metrics;
  auto engine = scheduler::Engine::Create(Options(&metrics),
                                          std::make_unique<TouchingBackend>(shared, &team), &clock);
  if (!engine.ok()) Die(engine.status());
  AddModel(**engine, layers);
  server::Config config;
  config.wire.message_bytes = kMessageBytes;
  config.wire.inflight_bytes = config.wire.staging_bytes = 4 * kMessageBytes;
  config.shm.spin_us = kLongestSpinMicros;
  auto staging = (*engine)->AllocateHost(static_cast<size_t>(config.wire.staging_bytes));
  if (!staging.ok()) Die(staging.status());
  server::SharedRegionTable regions({config.shm.region_bytes, config.shm.total_bytes,
                                     config.shm.regions_max, config.shm.tenant_regions},
                                    {});
  server::WireContext wire;
  wire.engine = engine->get();
  wire.pool =
      std::make_shared<server::AttendMessagePool>(*std::move(staging), (*engine)->tenants());
  wire.wire = config.wire;
  wire.metrics = &metrics;
  wire::ThreadTeam copies({shared->copy_threads, 1000});
  wire.team = &copies;
  wire.regions = &regions;
  wire.boot_id = 1;
  const std::unique_ptr<server::Tracer> tracer = MakeTracer(shared->trace_every);
  wire.tracer = tracer.get();
  const server::RpcContext rpc{engine->get(), &metrics, wire.boot_id};
  server::AttentionService attention(wire);
  server::SequenceService sequences(rpc);
  server::AdminOptions admin_options;
  admin_options.config = config;
  admin_options.shared_memory = true;
  server::AdminService admin(rpc, std::move(admin_options));
  BareService bare(shared, &team);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
  builder.AddListeningPort("unix:" + folder + "/s", grpc::InsecureServerCredentials());
  int tcp_port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &tcp_port);
  builder.RegisterService(&attention);
  builder.RegisterService(&sequences);
  builder.RegisterService(&admin);
  builder.RegisterAsyncGenericService(bare.service());
  server::CompletionPoller poller(&builder, {shared->poll_threads, 0});
  const std::unique_ptr<grpc::Server> grpc_server = builder.BuildAndStart();
  bare.Serve(&poller);
  attention.Serve(&poller);
  poller.Start();
  auto listener = OpenListener(wire, config.shm, folder + "/s.shm");
  shared->tcp_port = tcp_port;
  shared->ready = 1;
  while (shared->stop.load() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    poller.set_spin_us(shared->spin_us.load());
    attention.set_reads_in_place(shared->in_place.load() != 0);
    shared->copied_bytes = metrics.wire().copied_bytes.load();
    shared->allocations = kernels::testing::Allocations();
  }
  listener.reset();
  grpc_server->Shutdown(std::chrono::system_clock::now());
  attention.Stop();
  poller.Stop();
}

}  // namespace mla::bench
