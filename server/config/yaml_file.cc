#include "server/config/yaml_file.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
constexpr int kMaxDepth = 8;

// Thrown inside the parser and caught in this file, because the library offers no other way to stop
// early.
struct StopParsing {};

// Works on events instead of nodes, so that an alias bomb is refused before anything is expanded,
// and the depth is bounded while reading.
class Flattener final : public YAML::EventHandler {
 public:
  Flattener(std::string name, YamlDocument* out) : name_(std::move(name)), out_(out) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ == 0) return;
    // Stops here, because at some tokens the parser would find empty documents without end.
    Fault(mark, "one document only");
    throw StopParsing();
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    OnScalar(mark, "", anchor, "");
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    Fault(mark, "aliases are not allowed");
    throw StopParsing();
  }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                const std::string& value) override {
    CheckAnchor(mark, anchor);
    if (path_.empty()) {
      if (!value.empty()) Fault(mark, "expected `group:` lines");
      return;
    }
    if (!has_key_) {
      key_ = value;
      has_key_ = true;
      return;
    }
    has_key_ = false;
    Emit(mark, value);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    Fault(mark, "lists are not allowed; separate names by commas");
    throw StopParsing();
  }
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    CheckAnchor(mark, anchor);
    if (!path_.empty() && !has_key_) {
      Fault(mark, "a key must be a plain word");
      throw StopParsing();
    }
    path_.push_back(has_key_ ? key_ : "");
    has_key_ = false;
    if (path_.size() > kMaxDepth) {
      Fault(mark, absl::StrCat("nested deeper than ", kMaxDepth));
      throw StopParsing();
    }
  }
  void OnMapEnd() override { path_.pop_back(); }

 private:
  void Fault(const YAML::Mark& mark, const std::string& what) {
    out_->faults.push_back(absl::StrCat(name_, ":", mark.line + 1, ": ", what));
  }
  void CheckAnchor(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) Fault(mark, "anchors are not allowed");
  }
  void Emit(const YAML::Mark& mark, const std::string& value) {
    std::string path;
    for (size_t i = 1; i < path_.size(); ++i) absl::StrAppend(&path, path_[i], ".");
    absl::StrAppend(&path, key_);
    if (!seen_.insert(path).second) Fault(mark, absl::StrCat(path, ": given twice"));
    out_->values.push_back({path, value, mark.line + 1});
  }

  std::string name_;
  YamlDocument* out_;
  std::vector<std::string> path_;  // one entry for each open map; the first has an empty name
  std::string key_;
  bool has_key_ = false;
  int documents_ = 0;
  std::set<std::string> seen_;
};

}  // namespace

YamlDocument ParseYaml(const std::string& text, const std::string& name) {
  YamlDocument document;
  if (text.size() > kMaxBytes) {
    document.faults.push_back(
        absl::StrCat(name, ": got ", text.size(), " bytes, at most ", kMaxBytes, " are read"));
    return document;
  }
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    Flattener flattener(name, &document);
    while (parser.HandleNextDocument(flattener)) {
    }
  } catch (const StopParsing&) {
  } catch (const YAML::Exception& e) {
    document.faults.push_back(absl::StrCat(name, ":", e.mark.line + 1, ": ", e.msg));
  } catch (const std::exception& e) {
    document.faults.push_back(absl::StrCat(name, ": ", e.what()));
  }
  return document;
}

YamlDocument ReadYamlFile(const std::string& path) {
  YamlDocument document;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    document.faults.push_back(absl::StrCat(path, ": cannot be read"));
    return document;
  }
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (file.bad()) {  // a folder can be opened but not read
    document.faults.push_back(absl::StrCat(path, ": cannot be read"));
    return document;
  }
  return ParseYaml(text, path);
}

}  // namespace mla::server
