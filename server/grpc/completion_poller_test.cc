#include "server/grpc/completion_poller.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/grpc/stream_call.h"

namespace mla::server {
namespace {

using namespace std::chrono_literals;

grpc::ByteBuffer Message(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Text(const grpc::ByteBuffer& message) {
  grpc::Slice slice;
  return message.DumpToSingleSlice(&slice).ok()
             ? std::string(reinterpret_cast<const char*>(slice.begin()), slice.size())
             : "";
}

// Events of a server's calls.
struct Record {
  std::atomic<int> cancelled{0}, done{0};
  std::function<void(CompletionPoller&, const std::string&)> on_message;
};

// Answers each message with itself.
class Echo final : public StreamHandler {
 public:
  Echo(std::unique_ptr<StreamCall> call, Record* record) : call_(std::move(call)), record_(record) {
    call_->Serve(this);
    call_->StartRead(&incoming_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return call_->Finish(grpc::Status::OK);
    if (record_->on_message) record_->on_message(call_->poller(), Text(incoming_));
    call_->StartWrite(incoming_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return call_->Finish(grpc::Status::CANCELLED);
    call_->StartRead(&incoming_);
  }
  void OnCancel() override { ++record_->cancelled; }
  void OnDone() override {
    ++record_->done;
    delete this;
  }

 private:
  const std::unique_ptr<StreamCall> call_;
  Record* const record_;
  grpc::ByteBuffer incoming_;
};

class EchoServer {
 public:
  EchoServer(const CompletionPollerOptions& options, Record* record) {
    grpc::ServerBuilder builder;
    builder.RegisterAsyncGenericService(&service_);
    poller_ = std::make_unique<CompletionPoller>(&builder, options);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    server_ = builder.BuildAndStart();
    acceptor_ = std::make_unique<StreamAcceptor>(
        poller_.get(),
        [this](StreamCall* call, CompletionPoller* poller, void* tag) {
          service_.RequestCall(&call->context(), &call->stream(), poller->queue(), poller->queue(),
                               tag);
        },
        [record](std::unique_ptr<StreamCall> call) { new Echo(std::move(call), record); });
    acceptor_->Start();
    poller_->Start();
  }
  ~EchoServer() {
    server_->Shutdown(std::chrono::system_clock::now() + 5s);
    poller_->Stop();
  }
  std::shared_ptr<grpc::Channel> Connect() const {
    return grpc::CreateChannel("127.0.0.1:" + std::to_string(port_),
                               grpc::InsecureChannelCredentials());
  }

 private:
  grpc::AsyncGenericService service_;
  std::unique_ptr<CompletionPoller> poller_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<StreamAcceptor> acceptor_;
  int port_ = 0;
};

// One stream, whose operations are waited for one by one.
class Caller {
 public:
  explicit Caller(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    call_ = stub_.PrepareCall(&context_, "/test/Echo", &queue_);
    call_->StartCall(this);
    EXPECT_TRUE(Next());
  }
  ~Caller() {
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  std::string Echo(const std::string& text) {
    call_->Write(Message(text), this);
    EXPECT_TRUE(Next());
    grpc::ByteBuffer reply;
    call_->Read(&reply, this);
    EXPECT_TRUE(Next());
    return Text(reply);
  }
  grpc::Status Finish() {
    call_->WritesDone(this);
    EXPECT_TRUE(Next());
    grpc::Status status;
    call_->Finish(&status, this);
    EXPECT_TRUE(Next());
    return status;
  }
  grpc::Status Cancel() {
    context_.TryCancel();
    grpc::Status status;
    call_->Finish(&status, this);
    EXPECT_TRUE(Next());
    return status;
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

bool Becomes(const std::atomic<int>& value, int wanted) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (value.load() != wanted && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(1ms);
  }
  return value.load() == wanted;
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class CompletionPollerTest : public testing::TestWithParam<CompletionPollerOptions> {};

TEST_P(CompletionPollerTest, ServesCallsToTheirEnds) {
  Record record;
  EchoServer server(GetParam(), &record);
  Caller first(server.Connect()), second(server.Connect());
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(first.Echo(std::to_string(i)), std::to_string(i));
    EXPECT_EQ(second.Echo(std::to_string(-i)), std::to_string(-i));
  }
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_TRUE(Becomes(record.done, 2));
  EXPECT_EQ(record.cancelled, 0);
}

TEST_P(CompletionPollerTest, SaysThatACallerHasGone) {
  Record record;
  EchoServer server(GetParam(), &record);
  Caller caller(server.Connect());
  EXPECT_EQ(caller.Echo("here"), "here");
  EXPECT_EQ(caller.Cancel().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Becomes(record.done, 1));
  EXPECT_EQ(record.cancelled, 1);
}

TEST_P(CompletionPollerTest, SleepsWhenNothingComes) {
  Record record;
  EchoServer server(GetParam(), &record);
  Caller caller(server.Connect());
  EXPECT_EQ(caller.Echo("awake"), "awake");
  std::this_thread::sleep_for(100ms);
  const double before = CpuSeconds();
  std::this_thread::sleep_for(500ms);
  EXPECT_LT(CpuSeconds() - before, 0.1);
  EXPECT_EQ(caller.Echo("again"), "again");
  EXPECT_TRUE(caller.Finish().ok());
}

INSTANTIATE_TEST_SUITE_P(All, CompletionPollerTest,
                         testing::Values(CompletionPollerOptions{1, 0},
                                         CompletionPollerOptions{1, 2000},
                                         CompletionPollerOptions{4, 0},
                                         CompletionPollerOptions{4, 2000}),
                         [](const auto& info) {
                           return std::to_string(info.param.threads) + "_threads_" +
                                  std::to_string(info.param.spin_us) + "_us";
                         });

TEST(CompletionPollerHandOverTest, OthersAreServedMeanwhile) {
  Record record;
  std::promise<void> go_on;
  std::shared_future<void> may_go_on = go_on.get_future().share();
  std::atomic<int> stuck{0};
  record.on_message = [&](CompletionPoller& poller, const std::string& text) {
    if (text != "long") return;
    poller.HandOver();
    ++stuck;
    may_go_on.wait();
  };
  EchoServer server({2, 100}, &record);
  Caller patient(server.Connect()), other(server.Connect());
  auto answer = std::async(std::launch::async, [&] { return patient.Echo("long"); });
  ASSERT_TRUE(Becomes(stuck, 1));
  EXPECT_EQ(other.Echo("short"), "short");
  go_on.set_value();
  EXPECT_EQ(answer.get(), "long");
  EXPECT_TRUE(patient.Finish().ok());
  EXPECT_TRUE(other.Finish().ok());
}

// A handler that did not know that it would take long.
TEST(CompletionPollerTakeOverTest, OthersAreServedWhileAHandlerHangs) {
  Record record;
  std::promise<void> go_on;
  std::shared_future<void> may_go_on = go_on.get_future().share();
  std::atomic<int> stuck{0};
  record.on_message = [&](CompletionPoller&, const std::string& text) {
    if (text != "long") return;
    ++stuck;
    may_go_on.wait();
  };
  EchoServer server({3, 100}, &record);
  Caller first(server.Connect()), second(server.Connect()), other(server.Connect());
  auto first_answer = std::async(std::launch::async, [&] { return first.Echo("long"); });
  ASSERT_TRUE(Becomes(stuck, 1));
  auto second_answer = std::async(std::launch::async, [&] { return second.Echo("long"); });
  EXPECT_TRUE(Becomes(stuck, 2));
  if (stuck == 2) {
    for (int i = 0; i < 50; ++i) EXPECT_EQ(other.Echo("short"), "short");
  }
  go_on.set_value();
  EXPECT_EQ(first_answer.get(), "long");
  EXPECT_EQ(second_answer.get(), "long");
  for (int i = 0; i < 50; ++i) EXPECT_EQ(first.Echo(std::to_string(i)), std::to_string(i));
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  EXPECT_TRUE(other.Finish().ok());
}

TEST(CompletionPollerDefaultTest, SpinsOnlyWhereACoreIsFree) {
  EXPECT_EQ(DefaultSpinMicros(1, false), 0);
  EXPECT_EQ(DefaultSpinMicros(3, false), 0);
  EXPECT_EQ(DefaultSpinMicros(3, true), 0);
  EXPECT_GT(DefaultSpinMicros(4, true), 0);
  EXPECT_GT(DefaultSpinMicros(4, false), DefaultSpinMicros(4, true));
}

}  // namespace
}  // namespace mla::server
