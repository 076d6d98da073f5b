#include "tests/integration/worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "absl/strings/str_cat.h"
#include "proto/wire/ring_layout.h"

namespace mla::integration {
namespace {

// Error of storing one operand in bf16 and of rounding the result once.
constexpr double kTolerance = 0.01;

double Element(const std::vector<std::byte>& bytes, size_t index, v1::DType dtype) {
  if (dtype == v1::DTYPE_F32) {
    float value = 0;
    std::memcpy(&value, bytes.data() + index * 4, 4);
    return value;
  }
  uint16_t value = 0;
  std::memcpy(&value, bytes.data() + index * 2, 2);
  return FromBf16(value);
}

// Makes the call with its tensors in device memory that this process's CPUs also reach.
absl::StatusOr<client::AttendTimes> AttendOnDevice(client::Session* session, client::Step* step,
                                                   client::AttendCall call,
                                                   const std::vector<uint16_t>& kv_rows,
                                                   const std::vector<uint16_t>& queries,
                                                   std::span<std::byte> o, std::span<float> lse) {
  const auto kv = std::as_bytes(std::span(kv_rows)), q = std::as_bytes(std::span(queries));
  const uint64_t q_at = wire::AlignShared(kv.size()), lse_at = wire::AlignShared(o.size());
  const std::span<std::byte> in = session->AllocateOnDevice(q_at + q.size());
  const std::span<std::byte> out = session->AllocateOnDevice(lse_at + lse.size_bytes());
  if (in.empty() || out.empty()) return session->DeviceStatus();
  std::copy(kv.begin(), kv.end(), in.begin());
  std::copy(q.begin(), q.end(), in.begin() + static_cast<int64_t>(q_at));
  call.kv = in.data();
  call.q = in.data() + q_at;
  call.o = out.data();
  if (call.lse != nullptr) call.lse = reinterpret_cast<float*>(out.data() + lse_at);
  auto times = step->Attend(call);
  std::copy_n(out.begin(), o.size(), o.begin());
  std::memcpy(lse.data(), out.data() + lse_at, lse.size_bytes());
  session->FreeOnDevice(in);
  session->FreeOnDevice(out);
  return times;
}

}  // namespace

Worker::Worker(client::Client* client, const Dims& dims, const std::string& model_id, uint64_t seed)
    : client_(client), dims_(dims), model_id_(model_id), random_(seed) {
  const auto registered = client_->RegisterModel(SpecOf(dims_, model_id_));
  if (registered.ok()) session_ = *client_->OpenSession();
}

absl::Status Worker::Upload() {
  weights_ = RandomWeights(dims_, &random_);
  std::vector<client::WeightsChunk> chunks = ChunksOf(dims_, weights_);
  size_t next = 0;
  const auto reply =
      client_->UploadWeights(model_id_, [&]() -> std::optional<client::WeightsChunk> {
        if (next == chunks.size()) return std::nullopt;
        return chunks[next++];
      });
  if (!reply.ok()) return reply.status();
  return reply->complete() ? absl::OkStatus() : absl::InternalError("the upload is incomplete");
}

absl::StatusOr<Track> Worker::Open() {
  auto sequence = client_->OpenSequence(model_id_);
  if (!sequence.ok()) return sequence.status();
  return Track{*std::move(sequence), DenseCache(dims_.layers)};
}

absl::Status Worker::Layer(client::Step* step, int layer, const std::vector<Track*>& tracks,
                           const std::vector<uint32_t>& rows, v1::Profile profile,
                           v1::DType o_dtype) {
  const bool expanded = profile == v1::PROFILE_EXPANDED;
  const auto heads = static_cast<size_t>(dims_.heads);
  const auto q_dim = static_cast<size_t>(expanded ? dims_.nope + dims_.rope : dims_.row());
  const auto o_dim = static_cast<size_t>(expanded ? dims_.v : dims_.lora);
  const size_t total = step->total_rows();
  const std::vector<uint16_t> kv = RandomBf16(total * static_cast<size_t>(dims_.row()), &random_);
  const std::vector<uint16_t> q = RandomBf16(total * heads * q_dim, &random_);
  std::vector<std::byte> o(total * heads * o_dim * (o_dtype == v1::DTYPE_F32 ? 4 : 2));
  std::vector<float> lse(total * heads);
  client::AttendCall call;
  call.layer = static_cast<uint32_t>(layer);
  call.row_count = static_cast<uint32_t>(total);
  call.num_heads = static_cast<uint32_t>(heads);
  call.profile = profile;
  call.o_dtype = o_dtype;
  call.kv = kv.data();
  call.q = q.data();
  call.o = o.data();
  if (profile != v1::PROFILE_APPEND_ONLY) call.lse = lse.data();
  const auto times =
      on_device_ ? AttendOnDevice(session_.get(), step, call, kv, q, o, lse) : step->Attend(call);
  if (!times.ok()) return times.status();
  most_messages_ = std::max(most_messages_, times->messages);

  size_t row = 0;
  for (size_t s = 0; s < tracks.size(); ++s) {
    std::vector<uint16_t>& cached = tracks[s]->cache.layer[static_cast<size_t>(layer)];
    const size_t before = cached.size() / static_cast<size_t>(dims_.row());
    cached.insert(cached.end(), kv.begin() + static_cast<long>(row) * dims_.row(),
                  kv.begin() + static_cast<long>(row + rows[s]) * dims_.row());
    for (size_t r = 0; r < rows[s]; ++r, ++row) {
      for (size_t h = 0; h < heads && profile != v1::PROFILE_APPEND_ONLY; ++h) {
        const std::span<const uint16_t> q_row(q.data() + (row * heads + h) * q_dim, q_dim);
        const int position = static_cast<int>(before + r);
        std::vector<double> expected;
        if (expanded) {
          const size_t uk = static_cast<size_t>(dims_.nope * dims_.lora);
          const size_t uv = static_cast<size_t>(dims_.lora * dims_.v);
          const auto l = static_cast<size_t>(layer);
          expected = DenseExpanded(dims_, cached, position, q_row,
                                   std::span(weights_.uk[l]).subspan(h * uk, uk),
                                   std::span(weights_.uv[l]).subspan(h * uv, uv));
        } else {
          double expected_lse = 0;
          std::vector<double> wide(q_dim);
          for (size_t d = 0; d < q_dim; ++d) wide[d] = FromBf16(q_row[d]);
          expected = DenseAbsorbed(dims_, cached, position, wide, &expected_lse);
          if (std::abs(expected_lse - double{lse[row * heads + h]}) > kTolerance) {
            return absl::InternalError(absl::StrCat("layer ", layer, " row ", row, " head ", h,
                                                    ": lse ", lse[row * heads + h], ", expected ",
                                                    expected_lse));
          }
        }
        for (size_t d = 0; d < o_dim; ++d) {
          const double got = Element(o, (row * heads + h) * o_dim + d, o_dtype);
          if (!(std::abs(got - expected[d]) <= kTolerance * std::max(1.0, std::abs(expected[d])))) {
            return absl::InternalError(absl::StrCat("layer ", layer, " row ", row, " head ", h,
                                                    " element ", d, ": ", got, ", expected ",
                                                    expected[d]));
          }
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Worker::Step(const std::vector<Track*>& tracks, const std::vector<uint32_t>& rows,
                          v1::Profile profile, const std::vector<uint32_t>& keep,
                          v1::DType o_dtype) {
  std::vector<client::StepRows> begin;
  std::vector<size_t> lengths;
  for (size_t i = 0; i < tracks.size(); ++i) {
    begin.push_back({&tracks[i]->sequence, rows[i]});
    lengths.push_back(tracks[i]->sequence.length());
  }
  client::BeginOptions options;
  options.pipelined = pipelined_;
  auto step = session_->Begin(model_id_, begin, options);
  if (!step.ok()) return step.status();
  absl::Status status;
  for (int layer = 0; layer < dims_.layers && status.ok(); ++layer) {
    status = Layer(step->get(), layer, tracks, rows, profile, o_dtype);
  }
  if (status.ok()) status = (keep.empty() ? (*step)->End() : (*step)->End(keep)).status();
  for (size_t i = 0; i < tracks.size(); ++i) {
    const size_t kept = keep.empty() ? rows[i] : keep[i];
    tracks[i]->cache.Truncate(dims_, lengths[i] + (status.ok() ? kept : 0));
  }
  return status;
}

}  // namespace mla::integration
