// A tensor map as the harness writes it for the CPU (harness/backends/tensor_map.py has the same bytes), and what TMA does with one: boxes
// of a tensor in global memory against their image in shared memory.
#pragma once

#include <stdint.h>
#include <string.h>

namespace fa_host {

struct alignas(64) TensorMap {
    uint64_t base;
    uint64_t stride[4];  // bytes, of dimensions 1 to 4
    uint32_t dim[5], box[5];
    uint32_t rank, element_bytes;
    uint32_t swizzle;  // bytes that its pattern spans; 0: none
    uint32_t type;     // 1 float16, 2 bfloat16, 3 float32, 4 float64, 5 float8_e4m3
    uint64_t magic, unused[3];

    static constexpr uint64_t written = 0x3150414d54204146ull;  // "FA TMAP1"

    uint32_t row_bytes() const { return box[0] * element_bytes; }
    uint32_t rows() const {
        uint32_t n = 1;
        for (uint32_t d = 1; d < rank; ++d) n *= box[d];
        return n;
    }
    uint32_t box_bytes() const { return row_bytes() * rows(); }
    // The place in the image of a byte of the box: 16-byte chunks change places within 8 rows of 128 bytes.
    uint32_t swizzled(uint32_t byte) const { return byte ^ ((byte >> 7 & (swizzle / 16 - (swizzle != 0))) << 4); }

    // Calls row(address in global memory, byte of the box, bytes inside the tensor, bytes of the row that lie before them) for each row.
    template <class Row> void each_row(const int* at, Row row) const {
        const uint32_t n = rows();
        for (uint32_t r = 0; r < n; ++r) {
            uint64_t address = base;
            bool inside = true;
            uint32_t rest = r;
            for (uint32_t d = 1; d < rank; ++d) {
                const int64_t where = int64_t(at[d]) + rest % box[d];
                rest /= box[d];
                inside &= where >= 0 && where < int64_t(dim[d]);
                address += uint64_t(where) * stride[d - 1];
            }
            int64_t first = at[0] < 0 ? -int64_t(at[0]) : 0, last = int64_t(dim[0]) - at[0];
            if (last > int64_t(box[0])) last = box[0];
            if (!inside || last < first) first = last = 0;
            row(reinterpret_cast<char*>(address + int64_t(at[0] + first) * element_bytes), r * row_bytes(),
                uint32_t(last - first) * element_bytes, uint32_t(first) * element_bytes);
        }
    }

    // The image in shared memory of the box at some coordinates; zeros outside the tensor.
    void load(const int* at, unsigned char* image) const {
        each_row(at, [&](const char* from, uint32_t byte, uint32_t inside, uint32_t before) {
            unsigned char row[4096] = {};
            memcpy(row + before, from, inside);
            for (uint32_t chunk = 0; chunk < row_bytes(); chunk += 16) memcpy(image + swizzled(byte + chunk), row + chunk, 16);
        });
    }

    // The other way; what lies outside the tensor is not written.
    void store(const int* at, const unsigned char* image) const {
        each_row(at, [&](char* to, uint32_t byte, uint32_t inside, uint32_t before) {
            if (!swizzle) return void(memcpy(to, image + byte + before, inside));  // a row of bulk_store_f32 is long
            unsigned char row[4096];
            for (uint32_t chunk = 0; chunk < row_bytes(); chunk += 16) memcpy(row + chunk, image + swizzled(byte + chunk), 16);
            memcpy(to, row + before, inside);
        });
    }
};
static_assert(sizeof(TensorMap) == 128);

}  // namespace fa_host
