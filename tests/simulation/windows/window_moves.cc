#include "tests/simulation/windows/window_moves.h"

#include <algorithm>
#include <span>
#include <utility>

#include "scheduler/kvcache/pool/group_pieces.h"

namespace mla::simulation {

using scheduler::ImportArgs;
using scheduler::MovingPages;
using scheduler::PageMove;
using scheduler::SequenceTail;

absl::Status WindowMoves::MovePart(PageMove* move) {
  bool done = false;
  absl::Status answer;
  move->tenant = harness_.tenant();
  move->done = [&](const absl::Status& status) {
    done = true;
    answer = status;
  };
  const absl::Status started = harness_.core().transfers().Start(move);
  if (!started.ok()) return started;
  harness_.Run();
  return done ? answer : absl::InternalError("a part of a move without an answer");
}

absl::Status WindowMoves::MoveAll(const MovingPages& pages, bool in, bool window,
                                  Payloads* payloads) {
  const auto& layout = window ? pages.window_layout : pages.layout;
  const int64_t first = window ? FirstWindowRow(pages) : 0;
  const int64_t groups = (pages.tags.rows - first + layout.page_size - 1) / layout.page_size;
  payloads->resize(static_cast<size_t>(groups));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t left = pages.tags.rows - first - group * layout.page_size;
    const auto rows = static_cast<int32_t>(std::min<int64_t>(layout.page_size, left));
    const auto pieces = kvcache::GroupPieces(layout, rows);
    std::vector<std::byte>& payload = (*payloads)[static_cast<size_t>(group)];
    payload.resize(static_cast<size_t>(kvcache::PayloadBytes(pieces)));
    const auto bytes = static_cast<int64_t>(payload.size());
    for (int64_t at = 0, end = 0; at < bytes; at = end) {
      end = kvcache::PartEnd(pieces, at, part_bytes_);
      PageMove move;
      move.id = pages.id;
      move.in = in;
      move.window = window;
      move.page = first / layout.page_size + group;
      move.rows = rows;
      move.offset = at;
      move.bytes =
          std::span(payload).subspan(static_cast<size_t>(at), static_cast<size_t>(end - at));
      if (absl::Status status = MovePart(&move); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<MovedPages> WindowMoves::Out(const scheduler::ExportArgs& args) {
  absl::StatusOr<MovingPages> begun = harness_.core().transfers().BeginExport(args);
  if (!begun.ok()) return begun.status();
  MovedPages moved;
  absl::Status status = MoveAll(*begun, false, false, &moved.entries);
  if (status.ok()) status = MoveAll(*begun, false, true, &moved.window);
  std::vector<scheduler::SequenceId> absent;
  harness_.core().sequences().Release(harness_.tenant(), std::vector{begun->id}, &absent);
  if (!status.ok()) return status;
  if (begun->state.tail != nullptr) {
    moved.tail = std::to_integer<uint8_t>(begun->state.tail->data[0]);
    begun->state.tail.reset();
  }
  moved.pages = *std::move(begun);
  return moved;
}

absl::StatusOr<scheduler::SequenceInfo> WindowMoves::In(const MovedPages& moved,
                                                        uint64_t restored_id, bool gives_up) {
  ImportArgs args;
  args.tenant = harness_.tenant();
  args.model_id = moved.pages.model_id;
  args.tags = moved.pages.tags;
  args.restored_id = restored_id;
  absl::StatusOr<MovingPages> begun = harness_.core().sequences().BeginImport(args);
  if (!begun.ok()) return begun.status();
  Payloads entries = moved.entries, window = moved.window;
  absl::Status status = MoveAll(*begun, true, false, &entries);
  if (status.ok()) status = MoveAll(*begun, true, true, &window);
  if (status.ok() && gives_up) status = absl::CancelledError();
  if (!status.ok()) {
    harness_.core().transfers().AbortImport(harness_.tenant(), *begun);
    return status;
  }
  SequenceTail tail;
  if (args.tags.tail_position >= 0) {
    tail = {args.tags.tail_position,
            harness_.MakeTail(static_cast<size_t>(args.tags.tail_bytes), moved.tail)};
  }
  return harness_.core().transfers().EndImport(
      harness_.tenant(), begun->id, scheduler::Engine::kAllFinite,
      restored_id == 0 ? nullptr : &moved.pages.state, std::move(tail));
}

}  // namespace mla::simulation
