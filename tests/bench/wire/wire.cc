// Cost of the service in addition to the kernel, by path, between two processes.
//
//   wire_benchmark [--json FILE] [--seconds S] [--spin-us U] [--paths A,B] [--shapes A,B]
//                  [--turns T] [--piece-bytes B] [--poll-threads N] [--copy-threads K]
//                  [--touch-threads M] [--one-core-each] [--ahead L]
//
// S: seconds for one row, default 0.8, in T turns (default 16) that alternate with the shape's
// other rows; a turn is at least one step. U: microseconds that both sides of a gRPC path poll
// before they sleep, default 1000. B: tensor bytes of one request of the inline path, which cuts by
// rows as a session does; a bare message is always whole. N: threads that serve the server's
// streams. K: threads that share the copy of a large message if queries are gathered, default 4. M:
// threads on either side that touch tensors in gbps_wide, default a quarter of the CPUs, at most
// four. --one-core-each: all threads of the client stay on one core, all of the server's and its
// relays' on another; M is then 1. L: attends that are under way at once on a ring, default 1;
// p50_us is then a share of the time of all. The other paths are compared with the first.
//
// Paths: grpc_unary and grpc_stream are bare gRPC without server logic, polled as the service is.
// inline is an Attend stream over gRPC whose queries the backend reads in place, as a CPU backend
// does. inline_staged gathers the queries into staging memory, as for a GPU. shm has tensors in
// shared memory. NAME_sleep is the same path without spinning. grpc_stream_stock uses gRPC's
// synchronous interface (wire_stock.h). ring_futex and ring_spin are the command ring with both
// sides sleeping or spinning. inline_tcp is inline over TCP. ucx_tcp and ucx_shm are the command
// ring over UCX, by a relay; relay and client spin like gRPC paths. Names with _puts: with puts;
// with _alone: each entry travels alone. tcp_bare: the bytes of an attend over a TCP socket, and
// nothing else. The kernel computes nothing. One request is in flight at a time: a decode step is
// 61 dependent calls.
//
// p50_us and p99_us: one attend, from submitting the request to holding its reply. gbps: tensor
// bytes of both directions, divided by that time plus the time in which one thread writes each byte
// once on the sending side and reads it once on the receiving side. gbps_wide: the same with M
// threads on either side, because neither a worker nor a backend touches tensors with one core.
// copied_bytes: payload bytes that the server copied per attend. allocations: heap allocations of
// the whole server process per attend. messages: those of UCX that the client sent per attend.
// token_ms: a whole step of 61 layers, including begin and
// end. `x bare`: ratio to grpc_stream.
#include <grpcpp/create_channel.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "mla/v1/sequence.grpc.pb.h"
#include "proto/wire/grpc_tuning.h"
#include "relay/relay_channel.h"
#include "relay/relay_main.h"
#include "tests/bench/wire/bare_tcp.h"
#include "tests/bench/wire/parallel_touch.h"
#include "tests/bench/wire/ucx_path.h"
#include "tests/bench/wire/wire_paths.h"
#include "tests/bench/wire/wire_server.h"
#include "tests/bench/wire/wire_stock.h"

namespace mla::bench {
namespace {

using Clock = std::chrono::steady_clock;
// Paths that take turns. Those of kAlone have the machine for themselves, because a spinning ring's
// thread would take a core from the others.
constexpr const char* kPaths[] = {
    "grpc_stream",       "grpc_unary",   "inline",    "inline_staged", "shm",
    "grpc_stream_sleep", "inline_sleep", "shm_sleep", "ring_futex",    "grpc_stream_stock"};
constexpr const char* kAlone[] = {
    "ring_spin",     "inline_tcp",         "inline_tcp_sleep",         "ucx_tcp",
    "ucx_tcp_sleep", "ucx_tcp_puts",       "ucx_tcp_alone_sleep",      "ucx_shm",
    "ucx_shm_sleep", "ucx_shm_puts",       "ucx_shm_puts_sleep",       "ucx_shm_alone_sleep",
    "tcp_bare",      "ucx_tcp_puts_sleep", "ucx_tcp_puts_alone_sleep", "ucx_shm_puts_alone_sleep"};
constexpr Shape kShapes[] = {
    {"EXPANDED-1", v1::PROFILE_EXPANDED, 1},     {"EXPANDED-32", v1::PROFILE_EXPANDED, 32},
    {"EXPANDED-128", v1::PROFILE_EXPANDED, 128}, {"ABSORBED-1", v1::PROFILE_ABSORBED, 1},
    {"ABSORBED-32", v1::PROFILE_ABSORBED, 32},   {"ABSORBED-128", v1::PROFILE_ABSORBED, 128},
};

struct Options {
  double seconds = 0.8;
  int32_t turns = 16;
  std::string json;
  int32_t spin_us = 1000;
  int32_t poll_threads = 4;
  int32_t copy_threads = 4;
  int32_t trace_every = 0;
  int32_t touch_threads =
      std::clamp(static_cast<int32_t>(std::thread::hardware_concurrency()) / 4, 1, 4);
  uint64_t piece_bytes = (4 << 20) - 1024;  // bytes of a piece that a session sends
  std::string paths, shapes;                // empty: all
  std::array<int, 2> cpus{-1, -1};          // of the client and of the server; -1: all
  uint32_t ahead = 1;
};

// --------------------------------------------------------------------------------- Measurement

struct Row {
  std::string path, shape;
  double p50_us = 0, p99_us = 0, over_us = 0, gbps = 0, gbps_wide = 0, token_ms = 0;
  double copied_bytes = 0, allocations = 0, messages = 0;
};

// Value at `share` of the sorted values.
double Quantile(std::vector<double>& values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(values.size() * share))];
}

// One path at one shape, and its measurements so far.
struct Contender {
  Row row;
  Shape shape;
  std::unique_ptr<Path> path;
  std::vector<double> micros, step_millis;
  std::vector<double> touched_micros, wide_micros;  // by one thread, and by several threads on
                                                    // either side
  std::vector<double> over_micros;                  // for each turn: its p50 minus the first path's
  uint64_t copied_bytes = 0;
  int64_t allocations = 0;
  uint64_t messages = 0;
};

class Benchmark {
 public:
  Benchmark(const std::string& folder, Shared* shared, const Options& options)
      : folder_(folder),
        shared_(shared),
        options_(options),
        team_(options.touch_threads, &shared->touch) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
    channel_ = grpc::CreateCustomChannel("unix:" + folder + "/s",
                                         grpc::InsecureChannelCredentials(), arguments);
  }

  // Paths take turns, so that outside disturbances affect all of them alike.
  std::vector<Row> Measure(const std::vector<std::string>& paths, const Shape& shape) {
    OpenSequences(shape.batch);
    std::vector<Contender> contenders(paths.size());
    for (size_t i = 0; i < paths.size(); ++i) {
      contenders[i].row = {paths[i], shape.name};
      contenders[i].path = Open(paths[i], shape);
      Contender warm;
      Steps(*contenders[i].path, 0.1 * options_.seconds, &warm.micros, &warm.step_millis);
    }
    for (int turn = 0; turn < options_.turns; ++turn) {
      double first = 0;
      for (Contender& contender : contenders) {
        const double p50 = Turn(&contender);
        if (&contender == contenders.data()) first = p50;
        contender.over_micros.push_back(p50 - first);
      }
    }
    std::vector<Row> rows;
    for (Contender& contender : contenders) {
      Row& row = contender.row;
      const auto attends = static_cast<double>(contender.micros.size());
      row.copied_bytes = static_cast<double>(contender.copied_bytes) / attends;
      row.allocations = static_cast<double>(contender.allocations) / attends;
      row.messages = static_cast<double>(contender.messages) / attends;
      row.p50_us = Quantile(contender.micros, 0.5);
      row.p99_us = Quantile(contender.micros, 0.99);
      row.over_us = Quantile(contender.over_micros, 0.5);
      row.token_ms = Quantile(contender.step_millis, 0.5);
      const auto bytes = static_cast<double>(shape.in() + shape.o());
      row.gbps = bytes / Quantile(contender.touched_micros, 0.5) * 1e-3;
      row.gbps_wide = bytes / Quantile(contender.wide_micros, 0.5) * 1e-3;
      rows.push_back(row);
    }
    contenders.clear();
    CloseSequences();
    return rows;
  }

 private:
  // Returns the turn's p50.
  double Turn(Contender* contender) {
    shared_->spin_us = SpinOf(contender->row.path);
    Settle();
    const uint64_t copied = shared_->copied_bytes;
    const int64_t allocations = shared_->allocations;
    const uint64_t messages = contender->path->messages();
    std::vector<double> micros;
    Steps(*contender->path, options_.seconds / options_.turns, &micros, &contender->step_millis);
    contender->micros.insert(contender->micros.end(), micros.begin(), micros.end());
    Settle();
    contender->copied_bytes += shared_->copied_bytes - copied;
    contender->allocations += shared_->allocations - allocations;
    contender->messages += contender->path->messages() - messages;
    Touch(contender, 1, &contender->touched_micros);
    Touch(contender, options_.touch_threads, &contender->wide_micros);
    return Quantile(micros, 0.5);
  }

  void Touch(Contender* contender, int32_t threads, std::vector<double>* micros) {
    shared_->touch = threads;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // helpers wake or sleep
    std::vector<double> ignored;
    Steps(*contender->path, 0.5 * options_.seconds / options_.turns, micros, &ignored);
    shared_->touch = 0;
  }

  std::unique_ptr<Path> Open(const std::string& name, const Shape& shape) {
    const std::chrono::microseconds spin(SpinOf(name));
    if (name == "grpc_unary") return std::make_unique<BareUnary>(channel_, shape, spin);
    if (name == "grpc_stream_stock") return std::make_unique<StockStream>(folder_, shape);
    if (name.starts_with("grpc_stream")) {
      return std::make_unique<BareStream>(channel_, shape, spin);
    }
    // The server sees the change soon, and a stream sees it when it begins; so it is made before
    // the next stream is opened.
    shared_->in_place = name != "inline_staged";
    Settle();
    if (name.starts_with("inline_tcp")) {
      return std::make_unique<ServiceStream>(OverTcp(), shape, spin, nullptr, options_.piece_bytes);
    }
    if (name.starts_with("inline")) {
      return std::make_unique<ServiceStream>(channel_, shape, spin, nullptr, options_.piece_bytes);
    }
    const uint64_t bytes = shape.in() + shape.o() + (1 << 20);
    if (name == "tcp_bare") return std::make_unique<BareTcp>(*shared_, shape);
    if (name.starts_with("ucx")) {
      UcxPathOptions ucx;
      ucx.transports = name.starts_with("ucx_tcp") ? "tcp" : "posix,cma";
      ucx.puts = name.find("_puts") != std::string::npos;
      ucx.batches = name.find("_alone") == std::string::npos;
      ucx.spin = spin;
      ucx.own_cpu = options_.cpus[0];
      ucx.relay_cpu = options_.cpus[1];
      auto ring = OpenUcxRing(folder_ + "/s.shm", bytes, ucx);
      const auto sent = [at = ring.get()] { return at->messages_sent(); };
      return std::make_unique<Ring>(shape, std::move(ring), sent);
    }
    client::SharedMemoryOptions options;
    options.ring = name.starts_with("ring");
    options.bytes = bytes;
    if (name == "ring_spin") options.spin_us = options.server_spin_us = kLongestSpinMicros;
    auto memory = SharedMemory::Connect(folder_ + "/s.shm", options);
    Check(memory.status());
    if (!options.ring) {
      return std::make_unique<ServiceStream>(channel_, shape, spin, *std::move(memory));
    }
    return std::make_unique<Ring>(shape, *std::move(memory));
  }

  std::shared_ptr<grpc::Channel> OverTcp() const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, wire::kStreamWindowBytes);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(shared_->tcp_port.load()),
                                     grpc::InsecureChannelCredentials(), arguments);
  }

  // Spin time of both sides of a gRPC path.
  int32_t SpinOf(const std::string& path) const {
    return path.ends_with("_sleep") ? 0 : options_.spin_us;
  }

  void OpenSequences(uint32_t count) {
    const auto stub = v1::Sequences::NewStub(channel_);
    for (uint32_t i = 0; i < count; ++i) {
      grpc::ClientContext context;
      v1::OpenRequest request;
      request.set_model_id(kModel);
      v1::OpenReply reply;
      const grpc::Status status = stub->Open(&context, request, &reply);
      if (!status.ok()) Die(status.error_message());
      sequences_.push_back(reply.sequence());
    }
  }

  void CloseSequences() {
    const auto stub = v1::Sequences::NewStub(channel_);
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    for (const v1::SequenceInfo& info : sequences_) request.add_sequence_ids(info.sequence_id());
    v1::ReleaseReply reply;
    stub->Release(&context, request, &reply);
    sequences_.clear();
  }

  v1::AttendStreamRequest Begin(uint64_t step) const {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(step);
    begin->set_model_id(kModel);
    for (const v1::SequenceInfo& info : sequences_) {
      v1::StepSequence* rows = begin->add_sequences();
      rows->set_sequence_id(info.sequence_id());
      rows->set_epoch(info.epoch());
      rows->set_start_position(info.length());
      rows->set_rows(1);
    }
    return request;
  }

  // Runs whole steps for that long: at least one, and the last one only as far as time allows.
  void Steps(Path& path, double seconds, std::vector<double>* micros,
             std::vector<double>* step_millis) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    const bool touch = shared_->touch.load() != 0;
    do {
      const uint64_t step = ++step_;
      const auto start = Clock::now();
      path.Call(Begin(step));
      for (uint32_t layer = 0, count; layer < kLayers; layer += count) {
        count = std::min<uint32_t>(options_.ahead, kLayers - layer);
        const auto before = Clock::now();
        if (touch) team_.Fill(path.in.data(), path.in.size(), static_cast<int>(layer));
        path.Attends(step, layer, count);
        if (touch) sum_ += team_.Sum(path.out.data(), path.out.size());
        const std::chrono::duration<double, std::micro> took = Clock::now() - before;
        micros->insert(micros->end(), count, took.count() / count);
      }
      v1::AttendStreamRequest last;
      last.mutable_end_step()->set_step_id(step);
      path.Call(std::move(last));
      step_millis->push_back(
          std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      if (path.commits()) {
        for (v1::SequenceInfo& info : sequences_) info.set_length(info.length() + 1);
      }
    } while (Clock::now() < end);
  }

  // Lets the server publish its counters.
  static void Settle() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

  const std::string folder_;
  Shared* const shared_;
  const Options options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::vector<v1::SequenceInfo> sequences_;
  ParallelTouch team_;
  uint64_t step_ = 0, sum_ = 0;
};

void WriteJson(const std::vector<Row>& rows, const std::string& path) {
  std::ofstream file(path);
  file << "[\n";
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    file << "  {\"bench\": \"wire\", \"path\": \"" << row.path << "\", \"shape\": \"" << row.shape
         << "\", \"p50_us\": " << row.p50_us << ", \"p99_us\": " << row.p99_us
         << ", \"over_us\": " << row.over_us << ", \"gbps\": " << row.gbps
         << ", \"gbps_wide\": " << row.gbps_wide << ", \"copied_bytes\": " << row.copied_bytes
         << ", \"allocations\": " << row.allocations << ", \"messages\": " << row.messages
         << ", \"token_ms\": " << row.token_ms << "}" << (i + 1 < rows.size() ? "," : "") << "\n";
  }
  file << "]\n";
}

bool Names(const std::string& list, const std::string& name) {
  return list.empty() || ("," + list + ",").find("," + name + ",") != std::string::npos;
}

void Print(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    std::printf(
        "%-17s %-13s %10.1f %10.1f %8.3f %8.1f %8.2f %8.3f %8.2f %8.3f %12.0f %8.2f %8.2f %9.2f\n",
        row.path.c_str(), row.shape.c_str(), row.p50_us, row.p99_us, row.p50_us / rows[0].p50_us,
        row.over_us, row.gbps, row.gbps / rows[0].gbps, row.gbps_wide,
        row.gbps_wide / rows[0].gbps_wide, row.copied_bytes, row.allocations, row.messages,
        row.token_ms);
  }
  std::fflush(stdout);
}

void RunClient(const std::string& folder, Shared* shared, const Options& options) {
  if (options.cpus[0] >= 0) StayOn(options.cpus[0]);
  while (shared->ready.load() == 0 || shared->stock_ready.load() == 0 ||
         shared->bare_port.load() == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::printf("%u cores, %d touching threads\n", std::thread::hardware_concurrency(),
              options.touch_threads);
  std::printf("%-17s %-13s %10s %10s %8s %8s %8s %8s %8s %8s %12s %8s %8s %9s\n", "path", "shape",
              "p50 us", "p99 us", "x bare", "over us", "GB/s", "x bare", "GB/s M", "x bare",
              "copied", "allocs", "messages", "ms/token");
  std::vector<std::string> together;
  for (const char* path : kPaths) {
    if (Names(options.paths, path)) together.push_back(path);
  }
  std::vector<Row> all;
  Benchmark benchmark(folder, shared, options);
  for (const Shape& shape : kShapes) {
    if (!Names(options.shapes, shape.name)) continue;
    std::vector<Row> rows = benchmark.Measure(together, shape);
    for (const char* path : kAlone) {
      if (Names(options.paths, path)) rows.push_back(benchmark.Measure({path}, shape)[0]);
    }
    Print(rows);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  if (!options.json.empty()) WriteJson(all, options.json);
}

pid_t Fork(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  body();
  std::_Exit(0);
}

int Main(const Options& options) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const shared = new (page) Shared;
  shared->poll_threads = options.poll_threads;
  shared->touch_threads = options.touch_threads;
  shared->copy_threads = options.copy_threads;
  shared->trace_every = options.trace_every;
  char name[] = "/tmp/mla-wire-XXXXXX";
  const std::string folder = mkdtemp(name);
  // Forks before any side has a thread. The stock server runs without our setting of the heap.
  if (options.cpus[1] >= 0) StayOn(options.cpus[1]);
  const pid_t stock = Fork([&] { ServeStock(folder, shared); });
  const pid_t bare = Fork([&] { ServeBareTcp(shared); });
  wire::KeepMessageMemory();
  const pid_t service = Fork([&] { Serve(folder, shared); });
  RunClient(folder, shared, options);
  shared->stop = 1;
  kill(bare, SIGKILL);
  waitpid(bare, nullptr, 0);
  bool well = true;
  for (const pid_t child : {stock, service}) {
    int status = 0;
    waitpid(child, &status, 0);
    well = well && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  for (const char* socket : {"/s", "/stock"}) unlink((folder + socket).c_str());
  rmdir(folder.c_str());
  return well ? 0 : 1;
}

}  // namespace
}  // namespace mla::bench

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == mla::relay::kRelayCommand) {
    return mla::relay::RunRelay();
  }
  mla::bench::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const bool more = i + 1 < argc;
    if (argument.starts_with("--json=")) {
      options.json = argument.substr(7);
    } else if (argument == "--json" && more) {
      options.json = argv[++i];
    } else if (argument == "--seconds" && more) {
      options.seconds = std::atof(argv[++i]);
    } else if (argument == "--spin-us" && more) {
      options.spin_us = std::atoi(argv[++i]);
    } else if (argument == "--turns" && more) {
      options.turns = std::max(std::atoi(argv[++i]), 1);
    } else if (argument == "--poll-threads" && more) {
      options.poll_threads = std::atoi(argv[++i]);
    } else if (argument == "--copy-threads" && more) {
      options.copy_threads = std::max(std::atoi(argv[++i]), 1);
    } else if (argument == "--trace-every" && more) {
      options.trace_every = std::max(std::atoi(argv[++i]), 0);
    } else if (argument == "--touch-threads" && more) {
      options.touch_threads = std::max(std::atoi(argv[++i]), 1);
    } else if (argument == "--piece-bytes" && more) {
      options.piece_bytes = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--ahead" && more) {
      options.ahead = static_cast<uint32_t>(std::max(std::atoi(argv[++i]), 1));
    } else if (argument == "--one-core-each") {
      options.cpus = mla::bench::TwoCores();
      options.touch_threads = 1;  // several would spin, and keep each other from their core
    } else if (argument == "--paths" && more) {
      options.paths = argv[++i];
    } else if (argument == "--shapes" && more) {
      options.shapes = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: wire_benchmark [--json FILE] [--seconds S] [--spin-us U] "
                   "[--paths A,B] [--shapes A,B] [--turns T] [--piece-bytes B] [--poll-threads N] "
                   "[--touch-threads M] [--copy-threads K] [--trace-every N] "
                   "[--one-core-each] [--ahead L]\n");
      return 2;
    }
  }
  return mla::bench::Main(options);
}
