#include "tests/simulation/hand_over/dealt_weights.h"

#include "server/pages/page_digest.h"

namespace mla::simulation {
namespace {

using Message = v1::UploadWeightsRequest;

Message TrailerOf(const DealtWeights::Messages& call, uint32_t parts) {
  server::PageDigest digest(server::DigestKind::kXxh3);
  digest.Begin();
  for (const Message& message : call) digest.Add(message.chunk().payload());
  Message trailer;
  trailer.mutable_trailer()->set_xxh3(digest.End());
  trailer.mutable_trailer()->set_parts(parts);
  return trailer;
}

}  // namespace

DealtWeights DealWeights(const DealtWeights::Messages& whole, WeightsFault fault,
                         const std::function<uint64_t(uint64_t)>& pick) {
  DealtWeights dealt;
  dealt.fault = fault;
  const auto parts = static_cast<uint32_t>(fault == WeightsFault::kNone ? pick(4) : 1 + pick(3));
  dealt.calls.resize(1 + parts);
  dealt.calls[0].push_back(whole.front());
  for (size_t i = 1; i < dealt.calls.size(); ++i) {
    Message::Header* const header = dealt.calls[i].emplace_back().mutable_header();
    header->set_model_id(whole.front().header().model_id());
    header->set_tenant(whole.front().header().tenant());
    header->set_attempt(whole.front().header().attempt());
    header->set_is_part(true);
  }
  if (parts > 0) dealt.spoilt = 1 + pick(parts);
  const size_t chunks = whole.size() - 2;
  const size_t lost = fault == WeightsFault::kLost ? pick(chunks) : chunks;
  for (size_t i = 0; i < chunks; ++i) {
    if (i != lost) dealt.calls[pick(dealt.calls.size())].push_back(whole[1 + i]);
  }
  if (fault == WeightsFault::kRepeated) {
    dealt.calls[dealt.spoilt].push_back(whole[1 + pick(chunks)]);  // another's, or its own
  }
  for (size_t i = 0; i < dealt.calls.size(); ++i) {
    const uint32_t told = i > 0 ? 0 : parts;
    const bool wrong = i == 0 && fault == WeightsFault::kMiscounted;
    dealt.calls[i].push_back(
        TrailerOf(dealt.calls[i], wrong ? static_cast<uint32_t>(parts + 1 + pick(3)) : told));
  }
  if (fault == WeightsFault::kCut) {
    DealtWeights::Messages& call = dealt.calls[dealt.spoilt];
    call.resize(1 + pick(call.size() - 1));
  }
  return dealt;
}

}  // namespace mla::simulation
