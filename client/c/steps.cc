// Sessions, steps and attention.
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "client/c/connection.h"
#include "client/c/handles.h"

namespace mla::capi {
namespace {

v1::DType DtypeOf(mla_dtype dtype) {
  return dtype == mla_dtype{} ? v1::DTYPE_BF16 : static_cast<v1::DType>(dtype);
}

// The library reads and writes tensors before the server has seen the call, so what would reach
// past them is refused here.
absl::Status CheckCall(const mla_attend& call) {
  if (call.profile < MLA_PROFILE_ABSORBED || call.profile > MLA_PROFILE_PROJECTED) {
    return Refuse("attend.profile", "1..4", std::to_string(call.profile));
  }
  const struct {
    const char* field;
    mla_dtype dtype;
  } dtypes[] = {{"attend.q_dtype", call.q_dtype}, {"attend.o_dtype", call.o_dtype}};
  for (const auto& one : dtypes) {
    if (one.dtype < mla_dtype{} || one.dtype > MLA_DTYPE_F32) {
      return Refuse(one.field, "0..2", std::to_string(one.dtype));
    }
  }
  absl::Status status;
  if (call.profile == MLA_PROFILE_APPEND_ONLY) {
    status = CheckNotNull(call.kv, "attend.kv");
  } else {
    status = CheckNotNull(call.q, "attend.q");
    if (status.ok()) status = CheckNotNull(call.o, "attend.o");
  }
  if (status.ok() && call.list_entries != nullptr && call.list_width == 0) {
    status = CheckNotNull(call.list_begin, "attend.list_begin");
  }
  return status;
}

absl::StatusOr<client::AttendCall> CallOf(const mla_attend* given) {
  mla_attend known;
  absl::Status status = Read(given, true, "attend", &known);
  if (status.ok()) status = CheckCall(known);
  if (!status.ok()) return status;
  client::AttendCall call;
  call.layer = known.layer;
  call.row_begin = known.row_begin;
  call.row_count = known.row_count;
  call.head_offset = known.head_offset;
  call.num_heads = known.num_heads;
  call.profile = static_cast<v1::Profile>(known.profile);
  call.q_dtype = DtypeOf(known.q_dtype);
  call.o_dtype = DtypeOf(known.o_dtype);
  call.timeout_us = known.timeout_us;
  call.kv = known.kv;
  call.q = known.q;
  call.o = known.o;
  call.lse = known.lse;
  call.lists = {known.list_entries, known.list_width, known.list_begin};
  return call;
}

absl::Status Wait(absl::StatusOr<client::AttendTimes> times, mla_attend_times* out) {
  if (!times.ok()) return times.status();
  mla_attend_times known{};
  known.queue_us = times->queue_us;
  known.plan_us = times->plan_us;
  known.kernel_us = times->kernel_us;
  known.write_us = times->write_us;
  known.launch_requests = times->launch_requests;
  known.messages = times->messages;
  known.launch_layers = times->launch_layers;
  known.launch_clients = times->launch_clients;
  known.plan_reused = times->plan_reused ? 1 : 0;
  Write(known, out);
  return absl::OkStatus();
}

absl::Status Begin(mla_session* session, const char* model_id, std::span<const mla_step_rows> rows,
                   const mla_step_options* given, mla_step** out) {
  MLA_RETURN_IF_ERROR(CheckNotNull(out, "out"));
  *out = nullptr;
  absl::Status named = CheckNotNull(model_id, "model_id");
  if (named.ok() && !rows.empty()) named = CheckNotNull(rows.data(), "rows");
  if (!named.ok()) return named;
  mla_step_options known;
  MLA_RETURN_IF_ERROR(Read(given, false, "options", &known));
  client::BeginOptions options;
  options.step_id = known.step_id;
  options.lease_ms = known.lease_ms;
  if (known.traceparent != nullptr) options.traceparent = known.traceparent;
  if (known.rotation_count > 0) {
    absl::Status there = CheckNotNull(known.rotations, "options.rotations");
    if (!there.ok()) return there;
    options.rotations = {known.rotations, known.rotation_count};
  }
  if (known.participants != 0) options.participants = known.participants;
  std::vector<client::StepRows> sequences;
  std::vector<client::ClusterRows> of_cluster;
  for (const mla_step_rows& one : rows) {
    absl::Status status = CheckNotNull(one.sequence, "rows.sequence");
    if (!status.ok()) return status;
    auto* const of_client = std::get_if<client::Sequence>(&one.sequence->sequence);
    if ((of_client != nullptr) == (session->cluster != nullptr)) {
      return Refuse("rows.sequence", "of the session's client", "a sequence of another client");
    }
    if (of_client != nullptr) {
      sequences.push_back({of_client, one.rows});
    } else {
      of_cluster.push_back(
          {std::get_if<client::ClusterSequence>(&one.sequence->sequence), one.rows});
    }
  }
  auto result = std::make_unique<mla_step>();
  result->sequences = rows.size();
  if (session->cluster != nullptr) {
    MLA_ASSIGN_OR_RETURN(result->cluster,
                         session->cluster->Begin(model_id, of_cluster,
                                                 {.step = options, .partial = known.partial != 0}));
  } else {
    MLA_ASSIGN_OR_RETURN(result->step, session->session->Begin(model_id, sequences, options));
  }
  *out = result.release();
  return absl::OkStatus();
}

}  // namespace
}  // namespace mla::capi

using mla::capi::CheckNotNull;
using mla::capi::Guard;

mla_code mla_session_open(mla_client* client, mla_session** out, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    auto result = std::make_unique<mla_session>();
    if (client->cluster != nullptr) {
      result->cluster = client->cluster->OpenSession();
    } else {
      auto session = client->client->OpenSession();
      if (!session.ok()) return session.status();
      result->session = *std::move(session);
    }
    *out = result.release();
    return absl::OkStatus();
  });
}

const char* mla_session_transport(const mla_session* session) {
  // The view is of a string literal, so data() ends with a zero.
  return session->With([](auto* one) { return one->transport().data(); });
}

void* mla_session_allocate(mla_session* session, size_t bytes) {
  return session->With([&](auto* one) { return one->Allocate(bytes).data(); });
}

void mla_session_deallocate(mla_session* session, void* block) {
  // Blocks are known by where they begin.
  if (block == nullptr) return;
  session->With([&](auto* one) { one->Free({static_cast<std::byte*>(block), size_t{1}}); });
}

void mla_session_free(mla_session* session) { delete session; }

mla_code mla_step_begin(mla_session* session, const char* model_id, const mla_step_rows* rows,
                        size_t count, const mla_step_options* options, mla_step** out,
                        mla_error** error) {
  return Guard(error, [&] {
    return mla::capi::Begin(session, model_id, {rows, count}, options, out);
  });
}

uint64_t mla_step_id(const mla_step* step) {
  return step->With([](auto* one) { return one->id(); });
}
uint32_t mla_step_total_rows(const mla_step* step) {
  return step->With([](auto* one) { return one->total_rows(); });
}

mla_code mla_step_attend(mla_step* step, const mla_attend* call, mla_attend_times* times,
                         mla_error** error) {
  return Guard(error, [&] {
    const auto known = mla::capi::CallOf(call);
    if (!known.ok()) return known.status();
    return mla::capi::Wait(step->With([&](auto* one) { return one->Attend(*known); }), times);
  });
}

mla_code mla_step_attend_async(mla_step* step, const mla_attend* call, mla_pending** out,
                               mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(out, "out"); !status.ok()) return status;
    *out = nullptr;
    const auto known = mla::capi::CallOf(call);
    if (!known.ok()) return known.status();
    *out = step->With([&](auto* one) { return new mla_pending{one->AttendAsync(*known)}; });
    return absl::OkStatus();
  });
}

int mla_pending_ready(mla_pending* pending) {
  return pending == nullptr || std::visit([](auto& one) { return one.Ready(); }, pending->attend);
}

mla_code mla_pending_wait(mla_pending* pending, mla_attend_times* times, mla_error** error) {
  return Guard(error, [&] {
    if (absl::Status status = CheckNotNull(pending, "pending"); !status.ok()) return status;
    const std::unique_ptr<mla_pending> freed(pending);
    return mla::capi::Wait(std::visit([](auto& one) { return one.Wait(); }, freed->attend), times);
  });
}

mla_code mla_step_end(mla_step* step, const uint32_t* committed, mla_error** error) {
  return Guard(error, [&] {
    if (committed == nullptr) return step->With([](auto* one) { return one->End().status(); });
    const std::vector<uint32_t> rows(committed, committed + step->sequences);
    return step->With([&](auto* one) { return one->End(rows).status(); });
  });
}

mla_code mla_step_abort(mla_step* step, mla_error** error) {
  return Guard(error, [&] { return step->With([](auto* one) { return one->Abort(); }); });
}

void mla_step_free(mla_step* step) { delete step; }
