// Absorbed attention over rows of 8 bits on sm_90a from 17 packed rows on. It uses the computing
// groups of attend_wgmma.h; the third group widens the rows to bf16 and writes them to shared
// memory. Each value is widened once for 64 packed rows.
#ifndef MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ATTEND_WIDE_H_
#define MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ATTEND_WIDE_H_

#include "kernels/hip/device/sm90/decode/rows64_bf16/attend_wgmma.h"
#include "kernels/hip/device/sm90/decode/rows64_widened/widening_producer.h"

namespace mla::kernels::hip {

template <class C>
using AttendWide = AttendWgmma<C, AttendArgs, WideningProducer<C>>;

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_SM90_DECODE_ROWS64_WIDENED_ATTEND_WIDE_H_
