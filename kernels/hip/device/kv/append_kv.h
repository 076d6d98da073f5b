// Scatters new KV rows into pages, rounded to the format of the pages.
#ifndef MLA_KERNELS_HIP_DEVICE_KV_APPEND_KV_H_
#define MLA_KERNELS_HIP_DEVICE_KV_APPEND_KV_H_

#include "kernels/hip/device/primitives/block.h"
#include "kernels/hip/device/primitives/late.h"
#include "kernels/hip/device/primitives/memory.h"

namespace mla::kernels::hip {

// Uses one wave for each row, eight values a lane and turn. Stores the same bits as EncodeKvRow. A
// group of values with one scale is held by as many neighbouring lanes as it needs.
class AppendKv {
 public:
  static constexpr int kLaneValues = 8;
  static constexpr int kTurnValues = kLaneValues * tile::kWave;

  MLA_DEVICE static void run(const AppendArgs& args) {
    const int lane = tile::lane_index();
    const int row = block_index() * kSmallWaves + tile::wave_index();
    if (row >= args.first_row[args.count]) return;
    // The previous kernel does not write records; it may write page tables.
    const int index = find_range(args.first_row, args.count, row);
    const AppendRecord r = args.records[index];
    const int source_row = row - args.first_row[index];
    if (args.next_starts_early != 0) let_next_kernel_start();
    // Without that flag, waits before it lets the next kernel start: a kernel that waits next to a
    // gate must be small.
    wait_for_previous_kernel();
    if (came_late(args)) return;
    let_next_kernel_start();
    if (r.first_position < 0) return;
    const PagedRows pages(args.page_tables, r.page_table, args.pool, r.layer_offset, r.row_stride,
                          r.page_size, kPageGranuleBytes);
    const PagedRows::Place at = pages.place(r.first_position + source_row);
    uint8_t* const page = const_cast<uint8_t*>(pages.address(pages.granule(at.page), 0));
    AppendKv self(r, source_row * r.kv_row_stride, page, at.inside, lane);
    self.append();
    if (r.differs == nullptr) return;
    const float any = wave_max(self.differs == 0 ? 0.0f : 1.0f);
    if (lane == 0) *as_global<int32_t>(r.differs + source_row) = any > 0.0f ? 1 : 0;
  }

  // Returns a pair of elements in the form of kernels::Stored.
  MLA_DEVICE static uint32_t stored_pair(uint32_t pair) {
    const uint32_t low = (pair & 0x7fffu) < kStoredBound ? pair & 0xffffu : kStoredNaN;
    const uint32_t high =
        (pair >> 16 & 0x7fffu) < kStoredBound ? pair & 0xffff0000u : kStoredNaN << 16;
    return low | high;
  }

 private:
  struct Values {
    float x[kLaneValues];
  };

  MLA_DEVICE AppendKv(const AppendRecord& record, int64_t source_index, uint8_t* to_page,
                      int row_of_page, int lane_number)
      : r(record),
        source(source_index),
        page(to_page),
        inside(row_of_page),
        target(to_page + row_of_page * record.row_stride),
        lane(lane_number),
        f32(r.dtype == DType::kF32),
        aligned(aligned_to(r.kv, r.kv_row_stride, 0, f32 ? 4 : 2, 16)) {}

  MLA_DEVICE void append() {
    const int latent = r.row_dim - r.rope_dim;
    switch (r.format) {
      case KvFormat::kFp8Tensor:
        return store_fp8(0, r.row_dim, 1.0f / r.kv_scale);
      case KvFormat::kFp8Row: {
        const KvRowLayout at = MakeKvRowLayout(r.format, latent, r.rope_dim);
        store_groups<KvFormat::kFp8Row>(latent, target + at.scales_at);
        return store_bf16(latent, r.row_dim, at.rope_at);
      }
      case KvFormat::kFp8Page: {
        const KvRowLayout at = MakeKvRowLayout(r.format, latent, r.rope_dim);
        store_groups<KvFormat::kFp8Page>(latent, scales_of_page(at));
        return store_bf16(latent, r.row_dim, at.rope_at);
      }
      case KvFormat::kIndexKey:
        return store_groups<KvFormat::kIndexKey>(
            latent, scales_of_page(MakeKvRowLayout(r.format, latent, r.rope_dim)));
      case KvFormat::kBf16:
        return store_bf16(0, r.row_dim, 0);
    }
  }

  // Stores elements [begin, end) of the row at byte `offset` of the target.
  MLA_DEVICE void store_bf16(int begin, int end, int offset) {
    for (int i = begin + lane * kLaneValues; i < end; i += kTurnValues) {
      Chunk c = load_chunk(r.kv, source + i, f32, aligned);
#pragma unroll
      for (int w = 0; w < 4; ++w) c.w[w] = stored_pair(c.w[w]);
      put(target + offset + (i - begin) * 2, c.w);
    }
  }
  MLA_DEVICE void store_fp8(int begin, int end, float inverse) {
    for (int i = begin + lane * kLaneValues; i < end; i += kTurnValues) {
      put_codes(i - begin, load(i), inverse);
    }
  }
  // Scales of this row; a page stores them after its rows.
  MLA_DEVICE uint8_t* scales_of_page(const KvRowLayout& at) const {
    return page + r.page_size * r.row_stride + int64_t{inside} * at.page_scales_bytes;
  }
  // All lanes of a group help to find its scale; lanes past the row's end have no values.
  template <KvFormat kFormat>
  MLA_DEVICE void store_groups(int latent, uint8_t* scales) {
    constexpr int kGroupLanes = TraitsOf(kFormat).group / kLaneValues;
    constexpr bool kExponents = kFormat == KvFormat::kFp8Page;  // scales are exponent bytes
    static_assert(tile::kWave % kGroupLanes == 0);
    constexpr bool kShares = TraitsOf(kFormat).shares_scale;
    const float shared = kShares ? shared_scale<kGroupLanes>(latent) : 0.0f;
    for (int first = 0; first < latent; first += kTurnValues) {
      const int i = first + lane * kLaneValues;
      const bool inside = i < latent;
      Values v = {};
      if (inside) v = load(i);
      const float largest = largest_of_group<kGroupLanes>(v);
      const float scale = shared > 0.0f ? shared : KvGroupScale(largest, kPoolFp8);
      if (!inside) continue;
      put_codes(i, v, KvScaleInverse(scale));
      if (lane % kGroupLanes != 0) continue;
      const int group = i / (kGroupLanes * kLaneValues);
      if constexpr (kExponents) {
        put_byte(scales + group, static_cast<uint8_t>(float_to_bits(scale) >> 23));
      } else {
        const uint32_t bits[1] = {float_to_bits(scale)};
        put(scales + group * 4, bits);
      }
    }
  }

  // Returns KvSharedScale of the row.
  template <int kGroupLanes>
  MLA_DEVICE float shared_scale(int latent) const {
    float maximum = 0.0f, least = kNoKvGroup;
    for (int first = 0; first < latent; first += kTurnValues) {
      const int i = first + lane * kLaneValues;
      Values v = {};
      if (i < latent) v = load(i);
      const float largest = largest_of_group<kGroupLanes>(v);
      maximum = max_f(maximum, largest);
      if (largest > 0.0f && largest < least) least = largest;
    }
    return KvSharedScale(-wave_max(-least), wave_max(maximum), kPoolFp8);
  }
  // Returns the largest magnitude of a group, ignoring values that a row cannot hold.
  template <int kGroupLanes>
  MLA_DEVICE static float largest_of_group(const Values& v) {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < kLaneValues; ++k) {
      const float magnitude = bits_to_float(float_to_bits(v.x[k]) & 0x7fffffffu);
      if (!IsPoison(v.x[k])) largest = max_f(largest, magnitude);
    }
    return wave_max<kGroupLanes / 2>(largest);
  }

  MLA_DEVICE Values load(int i) const {
    Values v;
    if (f32) {
      uint32_t bits[kLaneValues];
      load_floats(bits, static_cast<const float*>(r.kv) + source + i, aligned);
#pragma unroll
      for (int k = 0; k < kLaneValues; ++k) v.x[k] = bits_to_float(bits[k]);
      return v;
    }
    const Chunk c = load_chunk(r.kv, source + i, false, aligned);
#pragma unroll
    for (int k = 0; k < kLaneValues; ++k) {
      v.x[k] = bits_to_float(k % 2 == 0 ? c.w[k / 2] << 16 : c.w[k / 2] & 0xffff0000u);
    }
    return v;
  }
  MLA_DEVICE void put_codes(int offset, const Values& v, float inverse) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < kLaneValues; ++k) {
      const uint32_t code =
          IsPoison(v.x[k]) ? Fp8NaN(kPoolFp8) : EncodeFp8(v.x[k] * inverse, kPoolFp8);
      words[k / 4] |= code << (k % 4 * 8);
    }
    put(target + offset, words);
  }
  // Stores words, or compares them with the stored ones.
  MLA_DEVICE void put_byte(uint8_t* address, uint8_t byte) {
    if (r.differs == nullptr) {
      *as_global<uint8_t>(address) = byte;
    } else {
      differs |= byte ^ *as_global<uint8_t>(address);
    }
  }
  template <int kWords>
  MLA_DEVICE void put(uint8_t* to, const uint32_t (&words)[kWords]) {
    if (r.differs == nullptr) return store_words(to, words);
    uint32_t stored[kWords];
    load_words(stored, to);
#pragma unroll
    for (int w = 0; w < kWords; ++w) differs |= words[w] ^ stored[w];
  }
  const AppendRecord& r;
  const int64_t source;  // index of the row's first element
  uint8_t* const page;
  const int inside;       // its index in the page
  uint8_t* const target;  // address of the row
  const int lane;
  const bool f32, aligned;
  uint32_t differs = 0;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_DEVICE_KV_APPEND_KV_H_
