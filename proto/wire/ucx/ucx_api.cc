#include "proto/wire/ucx/ucx_api.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace mla::wire {
namespace {

constexpr char kLibrary[] = "libucp.so.0";
// The first version with the active messages of today (ucp_worker_set_am_recv_handler, 1.10) and
// ucp_mem_map's present rules.
constexpr unsigned kLeastMajor = 1, kLeastMinor = 12;

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

absl::StatusOr<UcxApi> OpenUcxApi(const std::string& library) {
  const std::string name = library.empty() ? kLibrary : library;
  // A process with two copies of UCX would have two sets of hooks into its allocator.
  void* opened = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return absl::UnavailableError(absl::StrCat("no UCX: ", dlerror()));
  UcxApi api{};
  const char* missing = nullptr;
  const auto find = [&](const char* symbol, auto* function) {
    if (missing == nullptr && !Find(opened, symbol, function)) missing = symbol;
  };
  find("ucp_get_version", &api.get_version);
  find("ucp_config_read", &api.config_read);
  find("ucp_config_modify", &api.config_modify);
  find("ucp_config_release", &api.config_release);
  find("ucp_init_version", &api.init_version);
  find("ucp_cleanup", &api.cleanup);
  find("ucp_worker_create", &api.worker_create);
  find("ucp_worker_destroy", &api.worker_destroy);
  find("ucp_worker_get_address", &api.worker_get_address);
  find("ucp_worker_release_address", &api.worker_release_address);
  find("ucp_worker_set_am_recv_handler", &api.worker_set_am_recv_handler);
  find("ucp_worker_progress", &api.worker_progress);
  find("ucp_worker_arm", &api.worker_arm);
  find("ucp_worker_get_efd", &api.worker_get_efd);
  find("ucp_ep_create", &api.ep_create);
  find("ucp_ep_close_nbx", &api.ep_close_nbx);
  find("ucp_am_send_nbx", &api.am_send_nbx);
  find("ucp_am_recv_data_nbx", &api.am_recv_data_nbx);
  find("ucp_request_check_status", &api.request_check_status);
  find("ucp_request_free", &api.request_free);
  find("ucp_mem_map", &api.mem_map);
  find("ucp_mem_unmap", &api.mem_unmap);
  find("ucs_status_string", &api.status_string);
  if (missing != nullptr) {
    return absl::UnavailableError(absl::StrCat("UCX has no entry point ", missing));
  }
  unsigned major = 0, minor = 0, release = 0;
  api.get_version(&major, &minor, &release);
  if (major != kLeastMajor || minor < kLeastMinor) {
    return absl::UnavailableError(absl::StrCat("UCX ", UcxVersionText(api), " is not ", kLeastMajor,
                                               ".", kLeastMinor, " or a later 1.x"));
  }
  return api;
}

std::string UcxVersionText(const UcxApi& api) {
  unsigned major = 0, minor = 0, release = 0;
  api.get_version(&major, &minor, &release);
  return absl::StrCat(major, ".", minor, ".", release);
}

}  // namespace mla::wire
