// UCX's entry points, opened by name at run time. Headers come from the distribution; the library
// is the node's own, whose interface is the same since UCX 1.12.
//
// Tests make tables of their own, with functions that fail.
#ifndef MLA_PROTO_WIRE_UCX_UCX_API_H_
#define MLA_PROTO_WIRE_UCX_UCX_API_H_

#include <ucp/api/ucp.h>

#include <string>

#include "absl/status/statusor.h"

namespace mla::wire {

struct UcxApi {
  decltype(&ucp_get_version) get_version;
  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_context_query) context_query;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_get_address) worker_get_address;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_worker_arm) worker_arm;
  decltype(&ucp_worker_get_efd) worker_get_efd;
  decltype(&ucp_worker_query) worker_query;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_ep_close_nbx) ep_close_nbx;
  decltype(&ucp_am_send_nbx) am_send_nbx;
  decltype(&ucp_am_recv_data_nbx) am_recv_data_nbx;
  decltype(&ucp_request_check_status) request_check_status;
  decltype(&ucp_request_free) request_free;
  decltype(&ucp_mem_map) mem_map;
  decltype(&ucp_mem_unmap) mem_unmap;
  decltype(&ucp_rkey_pack) rkey_pack;
  decltype(&ucp_rkey_buffer_release) rkey_buffer_release;
  decltype(&ucp_ep_rkey_unpack) ep_rkey_unpack;
  decltype(&ucp_rkey_destroy) rkey_destroy;
  decltype(&ucp_put_nbx) put_nbx;
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx;
  decltype(&ucs_status_string) status_string;
};

// `library` empty: libucp.so.0 where the loader finds it, or the copy that the process has loaded.
// UNAVAILABLE has the loader's reason, or names the entry point or version that is missing. The
// library is never closed. Any thread.
absl::StatusOr<UcxApi> OpenUcxApi(const std::string& library);

// Returns the version of the library, such as "1.13.1".
std::string UcxVersionText(const UcxApi& api);

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_UCX_UCX_API_H_
