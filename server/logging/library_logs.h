// Turns lines that the libraries write themselves into events of this server's log.
//
// gRPC and protobuf print to standard error in their own formats. Much of it is about data that a
// client sent (a failed handshake, a name that is not UTF-8), as often as the client likes. After
// this call they appear as warnings `library` with the fields library and message: one a second at
// most, and the next one says in the field `suppressed` how many were left out.
//
// Threading: call once, before gRPC is used; the lines may come from any thread.
#ifndef MLA_SERVER_LOGGING_LIBRARY_LOGS_H_
#define MLA_SERVER_LOGGING_LIBRARY_LOGS_H_

namespace mla::server {

void CaptureLibraryLogs();

}  // namespace mla::server

#endif  // MLA_SERVER_LOGGING_LIBRARY_LOGS_H_
