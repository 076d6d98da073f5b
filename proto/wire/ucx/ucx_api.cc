#include "proto/wire/ucx/ucx_api.h"

#include "absl/strings/str_cat.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

namespace mla::wire {
namespace {

constexpr char kLibrary[] = "libucp.so.0";
// The first version with today's active messages (ucp_worker_set_am_recv_handler, 1.10) and
// ucp_mem_map's present rules.
constexpr unsigned kLeastMajor = 1, kLeastMinor = 12;

}  // namespace

absl::StatusOr<UcxApi> OpenUcxApi(const std::string& library) {
  const std::string name = library.empty() ? kLibrary : library;
  // A process with two copies of UCX would have two sets of hooks into its allocator.
  MLA_ASSIGN_OR_RETURN(const SharedLibrary opened,
                       OpenSharedLibrary({&name, 1}, LoadedCopy::kShare, "no UCX"));
  SymbolTable symbols(opened.handle);
  UcxApi api{};
  symbols.Need("ucp_get_version", &api.get_version);
  symbols.Need("ucp_config_read", &api.config_read);
  symbols.Need("ucp_config_modify", &api.config_modify);
  symbols.Need("ucp_config_release", &api.config_release);
  symbols.Need("ucp_init_version", &api.init_version);
  symbols.Need("ucp_context_query", &api.context_query);
  symbols.Need("ucp_cleanup", &api.cleanup);
  symbols.Need("ucp_worker_create", &api.worker_create);
  symbols.Need("ucp_worker_destroy", &api.worker_destroy);
  symbols.Need("ucp_worker_get_address", &api.worker_get_address);
  symbols.Need("ucp_worker_release_address", &api.worker_release_address);
  symbols.Need("ucp_worker_set_am_recv_handler", &api.worker_set_am_recv_handler);
  symbols.Need("ucp_worker_progress", &api.worker_progress);
  symbols.Need("ucp_worker_arm", &api.worker_arm);
  symbols.Need("ucp_worker_get_efd", &api.worker_get_efd);
  symbols.Need("ucp_worker_query", &api.worker_query);
  symbols.Need("ucp_ep_create", &api.ep_create);
  symbols.Need("ucp_ep_close_nbx", &api.ep_close_nbx);
  symbols.Need("ucp_am_send_nbx", &api.am_send_nbx);
  symbols.Need("ucp_am_recv_data_nbx", &api.am_recv_data_nbx);
  symbols.Need("ucp_request_check_status", &api.request_check_status);
  symbols.Need("ucp_request_free", &api.request_free);
  symbols.Need("ucp_mem_map", &api.mem_map);
  symbols.Need("ucp_mem_unmap", &api.mem_unmap);
  symbols.Need("ucp_rkey_pack", &api.rkey_pack);
  symbols.Need("ucp_rkey_buffer_release", &api.rkey_buffer_release);
  symbols.Need("ucp_ep_rkey_unpack", &api.ep_rkey_unpack);
  symbols.Need("ucp_rkey_destroy", &api.rkey_destroy);
  symbols.Need("ucp_put_nbx", &api.put_nbx);
  symbols.Need("ucp_ep_flush_nbx", &api.ep_flush_nbx);
  symbols.Need("ucs_status_string", &api.status_string);
  MLA_RETURN_IF_ERROR(symbols.Check("UCX"));
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
