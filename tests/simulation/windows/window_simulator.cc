#include "tests/simulation/windows/window_simulator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/splitmix.h"

namespace mla::simulation {
namespace {

using kernels::Bf16;
using scheduler::testing::EngineHarness;
using scheduler::testing::HarnessOptions;
using scheduler::testing::MakeRow;
using scheduler::testing::Row;
using scheduler::testing::TestRequest;

constexpr int kDim = 12, kMostTexts = 5, kMostSteps = 3, kMostLength = 80, kMostListed = 8;
constexpr size_t kMostExports = 2;
constexpr size_t kTailBytes = 40;
constexpr double kTolerance = 2e-3;

}  // namespace

void WindowCounts::Add(const WindowCounts& other) {
  operations += other.operations;
  answers += other.answers;
  commits += other.commits;
  aborts += other.aborts;
  passed += other.passed;
  tails += other.tails;
  moves += other.moves;
}

uint64_t WindowSimulator::Pick(uint64_t below) { return (random_ = SplitMix(random_)) % below; }

HarnessOptions WindowSimulator::Options(uint64_t seed) {
  const uint64_t drawn = SplitMix(seed ^ 0x77696e646f77u);
  HarnessOptions options{scheduler::testing::TinyLimits(), scheduler::testing::TinyModel(), nullptr,
                         nullptr};
  scheduler::ModelSpec& model = options.model;
  model.attention = kernels::AttentionKind::kWindow;
  model.geometry.nope_dim = model.geometry.v_dim = 0;
  model.page_size = drawn % 2 == 0 ? 4 : 8;
  model.window = 1 + static_cast<int32_t>(drawn / 2 % 9);
  model.ratios = {0, 2, drawn / 18 % 2 == 0 ? 4 : 1};
  model.layers = 3;
  model.top_k = kMostListed;
  model.tail_bytes = kTailBytes;
  return options;
}

WindowSimulator::WindowSimulator(uint64_t seed)
    : random_(SplitMix(seed)), harness_(std::make_unique<EngineHarness>(Options(seed))) {
  stream_ = harness_->core().steps().OpenStream(harness_->tenant());
  for (int i = 0; i < model().layers * model().geometry.num_heads; ++i) {
    sinks_.push_back(static_cast<float>(Pick(9)) - 4.0f);
  }
  const auto row = harness_->core().tenants().Enter(harness_->tenant());
  const auto found = harness_->core().models().Find((*row)->key(), model().id, "model_id");
  const absl::Status set = harness_->core().models().SetSinks(**found, {}, sinks_, "sinks");
  if (!set.ok()) Fail(absl::StrCat("sinks: ", set.ToString()));
}

void WindowSimulator::Fail(const std::string& what) {
  if (violation_.empty()) {
    violation_ = absl::StrCat("windows: after ", counts_.operations, " operations: ", what);
  }
}

std::string WindowSimulator::Run(int operations) {
  for (int i = 0; i < operations && violation_.empty(); ++i) {
    counts_.operations += Operate() ? 1 : 0;
    if (violation_.empty()) CheckBooks();
  }
  if (violation_.empty()) Finish();
  return violation_;
}

bool WindowSimulator::Operate() {
  const uint64_t drawn = Pick(100);
  if (drawn < 6) return Open();
  if (drawn < 10) return Fork();
  if (drawn < 15) return Truncate();
  if (drawn < 19) return Release();
  if (drawn < 34) return Begin();
  if (drawn < 74) return Attend();
  if (drawn < 88) return End();
  if (drawn < 92) return Export();
  return drawn < 96 ? Import() : Abort();
}

WindowText* WindowSimulator::Find(scheduler::SequenceId id) {
  const auto at =
      std::find_if(texts_.begin(), texts_.end(), [id](const WindowText& t) { return t.id == id; });
  return at == texts_.end() ? nullptr : &*at;
}

WindowText* WindowSimulator::AnyText(bool free) {
  if (texts_.empty()) return nullptr;
  WindowText* const text = &texts_[Pick(texts_.size())];
  return free && text->in_step ? nullptr : text;
}

bool WindowSimulator::Open() {
  if (texts_.size() == kMostTexts) return false;
  const scheduler::SequenceInfo info = harness_->Open();
  WindowText text;
  text.id = info.id;
  text.epoch = info.epoch;
  text.rows.resize(static_cast<size_t>(model().layers));
  text.entries.resize(static_cast<size_t>(model().layers));
  texts_.push_back(std::move(text));
  return true;
}

bool WindowSimulator::Fork() {
  const WindowText* const parent = AnyText(/*free=*/true);
  if (parent == nullptr || texts_.size() == kMostTexts) return false;
  scheduler::ForkArgs args;
  args.tenant = harness_->tenant();
  args.parent = parent->id;
  args.expected_epoch = parent->epoch;
  const int length = static_cast<int>(Pick(static_cast<uint64_t>(parent->length()) + 1));
  args.length = length;
  const auto child_info = harness_->core().sequences().Fork(args);
  const bool kept = parent->Kept(model(), length);
  if (child_info.ok() != kept) {
    Fail(absl::StrCat("fork at ", length, " of ", parent->length(), ", ", parent->gone,
                      " gone: ", child_info.status().ToString()));
  }
  if (!kept) ++counts_.passed;
  if (!child_info.ok()) return true;
  forked_ = true;
  WindowText child = *parent;
  child.id = child_info->id;
  child.epoch = child_info->epoch;
  child.CutTo(model(), length);
  texts_.push_back(std::move(child));
  return true;
}

bool WindowSimulator::Truncate() {
  WindowText* const text = AnyText(/*free=*/true);
  if (text == nullptr || text->length() == 0) return false;
  const int length = static_cast<int>(Pick(static_cast<uint64_t>(text->length())));
  const auto cut =
      harness_->core().sequences().Truncate(harness_->tenant(), text->id, length, text->epoch);
  const bool kept = text->Kept(model(), length);
  if (cut.ok() != kept) {
    Fail(absl::StrCat("truncation to ", length, " of ", text->length(), ", ", text->gone,
                      " gone: ", cut.status().ToString()));
  }
  if (!kept) ++counts_.passed;
  if (!cut.ok()) return true;
  text->epoch = cut->epoch;
  text->CutTo(model(), length);
  CheckTails();
  return true;
}

bool WindowSimulator::Release() {
  const WindowText* const text = AnyText(/*free=*/true);
  if (text == nullptr) return false;
  const std::vector<scheduler::SequenceId> ids = {text->id};
  std::vector<scheduler::SequenceId> absent;
  harness_->core().sequences().Release(harness_->tenant(), ids, &absent);
  texts_.erase(texts_.begin() + (text - texts_.data()));
  return true;
}

bool WindowSimulator::Export() {
  const WindowText* const text = AnyText(/*free=*/Chance(80));
  if (text == nullptr || exports_.size() == kMostExports) return false;
  const int length = text->length();
  const int end = Chance(60) ? length : static_cast<int>(Pick(static_cast<uint64_t>(length) + 1));
  const int first = Chance(5) ? model().page_size : 0;
  std::string expected = text->in_step ? "in_step" : first > 0 ? "window_not_moved" : "";
  if (expected.empty() && !text->Kept(model(), end)) expected = "window_passed";
  Exported exported{{}, *text};
  const int64_t part_bytes = Chance(50) ? 1 << 20 : 1 + static_cast<int64_t>(Pick(200));
  auto moved = WindowMoves(harness_.get(), part_bytes)
                   .Out({harness_->tenant(), text->id, text->epoch, first, end});
  Answer();
  if (DetailOf(moved.status()).reason != expected || moved.ok() != expected.empty()) {
    Fail(absl::StrCat("export of ", end, " of ", length, ", foretold \"", expected,
                      "\": ", moved.status().ToString()));
  }
  if (!moved.ok()) return true;
  exported.moved = *std::move(moved);
  exported.text.CutTo(model(), end);
  exported.text.gone = RowsPassed(model(), end);
  exports_.push_back(std::move(exported));
  return true;
}

bool WindowSimulator::Import() {
  if (exports_.empty() || texts_.size() == kMostTexts) return false;
  const size_t index = Pick(exports_.size());
  WindowText text = exports_[index].text;
  const bool restores = Chance(50), gives_up = Chance(15);
  std::string expected = restores && Find(text.id) != nullptr ? "sequence_open" : "";
  if (expected.empty() && text.length() == 0) expected = "out_of_range";
  const int64_t part_bytes = Chance(50) ? 1 << 20 : 1 + static_cast<int64_t>(Pick(200));
  const auto imported = WindowMoves(harness_.get(), part_bytes)
                            .In(exports_[index].moved, restores ? text.id : 0, gives_up);
  Answer();
  if (DetailOf(imported.status()).reason != expected ||
      (expected.empty() && absl::IsCancelled(imported.status()) != gives_up)) {
    Fail(absl::StrCat("import, foretold \"", expected, "\": ", imported.status().ToString()));
  }
  if (imported.ok() && restores && (imported->id != text.id || imported->epoch == text.epoch)) {
    Fail("a restored sequence has another id, or the epoch of before");
  }
  if (Chance(50)) exports_.erase(exports_.begin() + static_cast<int64_t>(index));
  if (!imported.ok()) return true;
  text.id = imported->id;
  text.epoch = imported->epoch;
  texts_.push_back(std::move(text));
  ++counts_.moves;
  CheckTails();
  return true;
}

bool WindowSimulator::Begin() {
  if (steps_.size() == kMostSteps) return false;
  Step step;
  step.id = ++last_step_;
  step.sent.assign(static_cast<size_t>(model().layers), 0);
  std::vector<scheduler::StepSequenceArgs> args;
  for (WindowText& text : texts_) {
    const int rows = 1 + static_cast<int>(Pick(Chance(20) ? 9 : 3));
    if (text.in_step || args.size() == 3 || Chance(40) || text.length() + rows > kMostLength) {
      continue;
    }
    args.push_back({text.id, text.epoch, text.length(), rows});
    Member member;
    member.id = text.id;
    member.start = text.length();
    member.rows = rows;
    member.offset = step.total;
    member.row_keys.resize(static_cast<size_t>(model().layers));
    member.entry_keys.resize(static_cast<size_t>(model().layers));
    step.members.push_back(std::move(member));
    step.total += rows;
  }
  if (args.empty() || step.total > 20) return false;
  const auto begun = harness_->Begin(stream_, step.id, args);
  if (!begun->status.ok()) Fail(absl::StrCat("begin: ", begun->status.ToString()));
  for (const Member& member : step.members) Find(member.id)->in_step = true;
  steps_.push_back(std::move(step));
  return true;
}

bool WindowSimulator::Attend() {
  if (steps_.empty()) return false;
  Step* const step = &steps_[Pick(steps_.size())];
  const int layer = static_cast<int>(Pick(static_cast<uint64_t>(model().layers)));
  const int left = step->total - step->sent[layer];
  if (left == 0) return false;
  Send(step, layer, Chance(60) ? left : 1 + static_cast<int>(Pick(static_cast<uint64_t>(left))));
  if (Chance(50)) {
    harness_->Run();
    Answer();
  }
  return true;
}

uint64_t WindowSimulator::AddRow(Member* member, int layer, std::vector<uint64_t>* whole) {
  member->row_keys[layer].push_back(++key_);
  const uint64_t row = key_;
  const int seen = member->start + static_cast<int>(member->row_keys[layer].size());
  if (EntriesAt(model(), layer, seen) > EntriesAt(model(), layer, seen - 1)) {
    member->entry_keys[layer].push_back(++key_);
    whole->push_back(key_);
  }
  return row;
}

WindowSimulator::Seen WindowSimulator::SeenBy(const Member& member, int layer, bool listed,
                                              Pending* pending) {
  const WindowText& text = *Find(member.id);
  std::vector<uint64_t> rows = text.rows[layer], entries = text.entries[layer];
  rows.insert(rows.end(), member.row_keys[layer].begin(), member.row_keys[layer].end());
  entries.insert(entries.end(), member.entry_keys[layer].begin(), member.entry_keys[layer].end());
  Seen seen;
  const auto last = std::min(rows.size(), static_cast<size_t>(model().window));
  seen.keys.assign(rows.end() - static_cast<int64_t>(last), rows.end());
  int named = 0;
  for (size_t entry = 0; entry < entries.size(); ++entry) {
    if (listed && (named == kMostListed || Chance(60))) continue;
    ++named;
    seen.keys.push_back(entries[entry]);
    if (listed) pending->list.push_back(static_cast<int32_t>(entry));
  }
  if (listed) pending->list_begin.push_back(static_cast<int32_t>(pending->list.size()));
  return seen;
}

void WindowSimulator::Send(Step* step, int layer, int rows) {
  const int heads = model().geometry.num_heads, first = step->sent[layer];
  auto pending = std::make_unique<Pending>();
  const bool listed = model().ratio(layer) > 0 && Chance(40);
  if (listed) pending->list_begin.push_back(0);
  std::vector<Row> kv;
  std::vector<uint64_t> whole;
  for (int row = first; row < first + rows; ++row) {
    auto member = step->members.end() - 1;
    while (member->offset > row) --member;
    kv.push_back(MakeRow(AddRow(&*member, layer, &whole), kDim));
    pending->rows.push_back(SeenBy(*member, layer, listed, pending.get()));
  }
  step->sent[layer] += rows;
  key_ += 1;
  pending->q_key = key_ * 8192;
  pending->step = step->id;
  pending->request =
      harness_->Unsent(stream_, step->id, layer, first, rows, kv, 0, heads, pending->q_key);
  TestRequest& request = *pending->request;
  for (const uint64_t key : whole) {
    for (const float value : MakeRow(key, kDim)) request.kv_rows.push_back(kernels::ToBf16(value));
  }
  request.attend.kv = reinterpret_cast<const std::byte*>(request.kv_rows.data());
  if (listed) {
    request.attend.list = pending->list.data();
    request.attend.list_begin = pending->list_begin.data();
  }
  harness_->Submit(&request);
  pending_.push_back(std::move(pending));
}

// Checks requests that have been answered.
void WindowSimulator::Answer() {
  for (auto& pending : pending_) {
    if (!pending->request->answered()) continue;
    Check(*pending);
    pending.reset();
  }
  std::erase(pending_, nullptr);
}

void WindowSimulator::Check(const Pending& pending) {
  const TestRequest& request = *pending.request;
  const bool open = std::any_of(steps_.begin(), steps_.end(),
                                [&](const Step& step) { return step.id == pending.step; });
  if (request.answers != 1) Fail(absl::StrCat("a request with ", request.answers, " answers"));
  if (!request.status.ok()) {
    if (open) Fail(absl::StrCat("attend: ", request.status.ToString()));
    return;
  }
  for (int row = 0; row < request.attend.row_count; ++row) {
    for (int head = 0; head < request.attend.num_heads; ++head) CheckRow(pending, row, head);
  }
}

void WindowSimulator::CheckRow(const Pending& pending, int row, int head) {
  const TestRequest& request = *pending.request;
  const int heads = request.attend.num_heads;
  const uint64_t q_key = pending.q_key +
                         static_cast<uint64_t>(request.attend.row_begin + row) * 64 +
                         static_cast<uint64_t>(head);
  const double sink = sinks_[static_cast<size_t>(request.attend.layer * heads + head)];
  const double worst = ErrorOf(request, static_cast<size_t>(row * heads + head),
                               pending.rows[static_cast<size_t>(row)].keys, q_key, kDim,
                               model().softmax_scale, sink);
  ++counts_.answers;
  hash_ = (hash_ ^ pending.rows[static_cast<size_t>(row)].keys.back()) * 0x100000001b3u;
  if (worst <= kTolerance) return;
  Fail(absl::StrCat("layer ", request.attend.layer, ", row ", row, ", head ", head, ": off by ",
                    worst));
}

void WindowSimulator::Close(size_t at, const std::vector<int>* committed,
                            const std::vector<int>& tails) {
  for (size_t i = 0; i < steps_[at].members.size(); ++i) {
    const Member& member = steps_[at].members[i];
    WindowText& text = *Find(member.id);
    text.in_step = false;
    if (committed == nullptr) continue;
    for (int layer = 0; layer < model().layers; ++layer) {
      const auto append = [](std::vector<uint64_t>& to, const std::vector<uint64_t>& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(text.rows[layer], member.row_keys[layer]);
      append(text.entries[layer], member.entry_keys[layer]);
    }
    text.CutTo(model(), member.start + (*committed)[i]);
    if (tails[i] > 0) {
      text.tail = tails[i];
      text.tail_at = text.length();
    }
    text.gone = std::max(text.gone, RowsPassed(model(), text.length()));
  }
  steps_.erase(steps_.begin() + static_cast<int64_t>(at));
}

bool WindowSimulator::End() {
  if (steps_.empty()) return false;
  const size_t index = Pick(steps_.size());
  Step& step = steps_[index];
  for (int layer = 0; layer < model().layers; ++layer) {
    if (step.sent[layer] < step.total) Send(&step, layer, step.total - step.sent[layer]);
  }
  std::vector<int32_t> committed;
  for (const Member& member : step.members) {
    committed.push_back(Chance(60) ? member.rows
                                   : static_cast<int32_t>(Pick(uint64_t(member.rows) + 1)));
  }
  std::vector<int> sent;
  std::vector<scheduler::TailArgs> tails;
  for (size_t i = 0; i < step.members.size(); ++i) {
    sent.push_back(Chance(40) ? 1 + static_cast<int>(Pick(250)) : 0);
    if (sent.back() == 0) continue;
    const auto value = static_cast<uint8_t>(sent.back());
    tails.push_back({static_cast<int32_t>(i), harness_->MakeTail(kTailBytes, value)});
  }
  const auto end = harness_->End(stream_, step.id, committed, std::move(tails));
  harness_->Run();
  Answer();
  if (!end->status.ok() || !end->answered()) Fail(absl::StrCat("end: ", end->status.ToString()));
  ++counts_.commits;
  const std::vector<int> rows(committed.begin(), committed.end());
  Close(index, &rows, sent);
  CheckTails();
  return true;
}

bool WindowSimulator::Abort() {
  if (steps_.empty()) return false;
  const size_t at = Pick(steps_.size());
  const auto abort = harness_->Abort(stream_, steps_[at].id);
  Close(at, nullptr);
  harness_->Run();
  Answer();
  if (!abort->status.ok() || !abort->answered()) {
    Fail(absl::StrCat("abort: ", abort->status.ToString()));
  }
  ++counts_.aborts;
  return true;
}

void WindowSimulator::CheckTails() {
  for (const WindowText& text : texts_) {
    if (text.in_step) continue;
    const auto read =
        harness_->core().sequences().ReadTail(harness_->tenant(), text.id, text.epoch);
    if (read.ok() != (text.tail > 0))
      return Fail("a sequence has an unexpected tail, or lacks one");
    if (!read.ok()) continue;
    const auto value = static_cast<std::byte>(text.tail);
    const std::byte* const data = read->tail->data.get();
    if (read->position != text.tail_at || read->tail->size != kTailBytes ||
        !std::all_of(data, data + kTailBytes, [value](std::byte b) { return b == value; })) {
      return Fail(
          absl::StrCat("another tail: at ", read->position, ", foretold is ", text.tail_at));
    }
    ++counts_.tails;
  }
}

void WindowSimulator::CheckBooks() {
  int64_t groups = 0;
  const auto pages = [](int64_t rows, int64_t page) { return (rows + page - 1) / page; };
  for (const WindowText& text : texts_) {
    if (!text.in_step && harness_->Get(text.id).length != text.length()) {
      return Fail("a sequence has another length");
    }
    int64_t rows = text.length();
    for (const Step& step : steps_) {
      for (const Member& member : step.members) rows += member.id == text.id ? member.rows : 0;
    }
    groups += pages(rows, model().page_size) + pages(rows, model().window_page_size()) -
              text.gone / model().window_page_size();
  }
  const auto used = static_cast<int64_t>(harness_->core().Stats().page_groups_used);
  if (forked_ ? used > groups : used != groups) {
    Fail(absl::StrCat(used, " page groups in use, foretold are ", groups));
  }
}

void WindowSimulator::Finish() {
  while (!steps_.empty() && violation_.empty()) Abort();
  while (!texts_.empty()) Release();
  forked_ = false;
  CheckBooks();
  const auto usage = harness_->core().tenants().Usage(harness_->tenant());
  if (usage.used[scheduler::Resource::kTailBytes] != 0)
    Fail("tails without a sequence are counted");
  if (!pending_.empty()) Fail("a request without an answer");
}

}  // namespace mla::simulation
