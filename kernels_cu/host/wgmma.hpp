// wgmma: products of a warpgroup in flight, from their issue to the wait that retires their group.
//
// The 128 threads issue a product together. Its arithmetic is done at once, on the engine's own copy of the accumulators, and products on
// the same accumulators in flight continue there. The registers themselves hold NaN until the wait that retires the last of these
// products: an early read shows in the result (and by name under the race check, which sees the compiler's loads). At that wait each
// thread compares: its accumulators must still be NaN, its A registers and both operands in shared memory as they were at the issue.
#pragma once

#include <stdint.h>
#include <string.h>

#include "barrier.hpp"
#include "block.hpp"
#include "fiber.hpp"
#include "race.hpp"
#include "report.hpp"
#include "scheduler.hpp"

namespace fa_host {

// A descriptor of a matrix in shared memory: rows of 128 bytes in atoms of 8 rows, swizzled.
struct Descriptor {
    uint32_t start, leading, stride, mode;

    explicit Descriptor(unsigned long long bits)
        : start(uint32_t(bits & 0x3fff) << 4),
          leading(uint32_t(bits >> 16 & 0x3fff) << 4),
          stride(uint32_t(bits >> 32 & 0x3fff) << 4),
          mode(uint32_t(bits >> 62)) {}

    static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
    // Where 8 elements along k of a row lie: K-major.
    uint32_t of_row(int row, int half) const { return swizzled(start + row / 8 * stride + row % 8 * 128 + half * 16); }
    // Where columns (of B, rows of A) 8 * eighth to 8 * eighth + 7 of line k lie: MN-major.
    uint32_t of_line(int k, int eighth) const {
        return swizzled(start + eighth / 8 * leading + k / 8 * stride + k % 8 * 128 + eighth % 8 * 16);
    }
};

struct Wgmma {
    // A signalling NaN: arithmetic makes another NaN of it, so that also a register which is only scaled is seen as written.
    static constexpr uint32_t poison = 0xffbfffff;
    static constexpr int max_columns = 256, max_registers = 128, ring = 512, max_chains = 8, max_seen = 32;

    struct Chain {  // products on the same accumulators
        float value[4][max_columns][16];  // [warp][column][row]
        float* d[128];  // each thread's registers
        int registers;
        bool in_flight;
        unsigned last;  // the number of its last product
        int left;  // threads whose registers it still owns
        const char* file;
        int line;
    };
    struct Issued {
        Descriptor a, b;
        int columns, chain, line;
        bool transposed_a, transposed_b, registers_a;
        unsigned group;
        uint64_t hash;  // of the operands in shared memory
        const uint32_t* a_at[128];
        uint32_t a_value[128][4];
        int left;  // threads that have not retired it
        bool waited[4];  // a lane of the warp has
        int16_t reader[4];  // under the race check: the thread of each warp whose wait was first, and its clock then
        uint32_t reader_clock[4];
        const char* file;
        void* code;
    };
    struct Seen {  // registers that a product of this thread has read or written, and what they held at the last wgmma_fence
        const void* at;
        int words;
        uint32_t value[max_registers];
    };
    struct Group {  // a warpgroup
        unsigned issued, retired[128], commits[128];
        bool fenced[128];
        unsigned seen_next[128];
        Seen seen[128][max_seen];
        Chain chain[max_chains];
        Issued product[ring];
    };

    int used;  // warpgroups that have issued in this block
    Group group[max_warpgroups];

    static Wgmma* of(Worker& w) {
        if (!w.wgmma) {
            w.wgmma = reinterpret_cast<Wgmma*>(map_memory(sizeof(Wgmma)));
            if (!w.wgmma) {
                out_of_memory("products in flight", sizeof(Wgmma));
                abort_block(w);
            }
        }
        return w.wgmma;
    }

    void new_block(int threads) {
        for (int i = 0; i < threads / 128; ++i) {
            Group& g = group[i];
            g.issued = 0;
            memset(g.retired, 0, sizeof g.retired);
            memset(g.commits, 0, sizeof g.commits);
            memset(g.fenced, 0, sizeof g.fenced);
            memset(g.seen_next, 0, sizeof g.seen_next);
            for (auto& c : g.chain) c.in_flight = false;
        }
    }

    void fence(int thread) {
        Group& g = group[thread / 128];
        const int lane = thread % 128;
        g.fenced[lane] = true;
        const unsigned known = g.seen_next[lane] < unsigned(max_seen) ? g.seen_next[lane] : unsigned(max_seen);
        for (unsigned i = 0; i < known; ++i) memcpy(g.seen[lane][i].value, g.seen[lane][i].at, 4 * size_t(g.seen[lane][i].words));
    }
    void commit(int thread) { ++group[thread / 128].commits[thread % 128]; }

    // All threads of warpgroup i have arrived with a product.
    void issue(Worker& w, int i, const Product* const* lanes, void* code, const char* word, const char* file, int line) {
        Group& g = group[i];
        const Product& first = *lanes[0];
        check_equal(w, g, lanes, word, file, line);
        const int columns = 2 * first.registers;
        Issued& p = oldest(w, g, file, line);
        p.a = Descriptor(first.a), p.b = Descriptor(first.b);
        p.columns = columns, p.transposed_a = first.transposed_a, p.transposed_b = first.transposed_b, p.registers_a = first.registers_a;
        p.group = g.commits[0], p.left = 128, p.file = file, p.line = line, p.code = code;
        for (int warp = 0; warp < 4; ++warp) p.reader[warp] = -1, p.waited[warp] = false;
        unsigned short a[64][16], b[max_columns * 16], turned[max_columns * 16];
        check_descriptors(w, p, word, file, line);
        p.hash = gather(w, p, a, p.transposed_b ? turned : b, word);
        if (p.transposed_b)
            for (int k = 0; k < 16; ++k)
                for (int n = 0; n < columns; ++n) b[n * 16 + k] = turned[k * columns + n];
        for (int warp = 0; w.race && warp < 4; ++warp) read_by(w, p, warp, 128 * i + 32 * warp, read_begun);
        if (first.registers_a) take_registers_a(p, lanes, a);
        for (int t = 0; t < 128 && first.registers_a; ++t) check_fenced(w, g, t, p.a_at[t], 4, word, file, line);
        p.chain = chained(w, g, lanes, word, file, line);
        Chain& c = g.chain[p.chain];
        c.last = g.issued++;
        first.multiply(&c.value[0][0][0], &a[0][0], b, columns);
    }

    // wgmma.wait_group of one thread: all but its latest `but` groups are retired.
    void wait(Worker& w, int thread, unsigned but, void* code) {
        Group& g = group[thread / 128];
        const int lane = thread % 128;
        while (g.retired[lane] != g.issued) {
            Issued& p = g.product[g.retired[lane] % ring];
            if (g.commits[lane] - p.group <= but) break;
            retire(w, p, thread, code);
            ++g.retired[lane];
        }
        for (Chain& c : g.chain)
            if (c.in_flight && c.d[lane] && int(g.retired[lane] - c.last) > 0) write_back(w, c, thread, code);
    }

    // The product that a wait of this thread retires first, where its warp has retired none of it; null where there is none.
    const Issued* awaited(int thread, unsigned but) const {
        const Group& g = group[thread / 128];
        const int lane = thread % 128;
        if (g.retired[lane] == g.issued) return nullptr;
        const Issued& p = g.product[g.retired[lane] % ring];
        return g.commits[lane] - p.group > but && !p.waited[lane / 32] ? &p : nullptr;
    }

    // This thread has returned.
    void end(Worker& w, int thread) {
        Group& g = group[thread / 128];
        if (g.retired[thread % 128] == g.issued) return;
        const Issued& p = g.product[g.retired[thread % 128] % ring];
        begin_report(w, "a thread ended with a wgmma in flight that it has not waited for");
        print(": thread %d, issued at %s:%d\n", thread, p.file, p.line);
        end_report(w);
    }

    // An access by the kernel's own code: to registers in flight?
    void touched(Worker& w, const char* address, size_t bytes, bool writes, void* code) {
        if (address < stack_bottom(w, w.current) || address >= stack_bottom(w, w.current) + w.stack_bytes) return;
        Group& g = group[w.current / 128];
        const int lane = w.current % 128;
        for (const Chain& c : g.chain)
            if (c.in_flight && c.d[lane] && overlap(address, bytes, c.d[lane], 4 * c.registers))
                name_access(w, writes ? "an accumulator of a wgmma in flight is written" : "an accumulator of a wgmma in flight is read",
                            code, c.file, c.line);
        for (unsigned n = g.retired[lane]; writes && n != g.issued; ++n)
            if (const Issued& p = g.product[n % ring]; p.registers_a && overlap(address, bytes, p.a_at[lane], 16))
                name_access(w, "an A register of a wgmma in flight is written", code, p.file, p.line);
    }

  private:
    // What is known of some registers of a thread; unknown ones are entered as they are.
    Seen& seen(Group& g, int t, const void* at, int words) {
        const unsigned known = g.seen_next[t] < unsigned(max_seen) ? g.seen_next[t] : unsigned(max_seen);
        unsigned i = 0;
        while (i < known && g.seen[t][i].at != at) ++i;
        if (i == known) i = g.seen_next[t]++ % max_seen;
        else if (g.seen[t][i].words == words) return g.seen[t][i];
        Seen& made = g.seen[t][i];
        made.at = at, made.words = words;
        memcpy(made.value, at, 4 * size_t(words));
        return made;
    }

    // Registers that a product reads must not have been written since the last fence: it would read what they held before.
    void check_fenced(Worker& w, Group& g, int t, const void* at, int words, const char* word, const char* file, int line) {
        if (!memcmp(seen(g, t, at, words).value, at, 4 * size_t(words))) return;
        begin_report(w, "registers of a wgmma were written since the last wgmma_fence");
        print(": thread %d of a warpgroup in %s at %s:%d\n", t, word, file, line);
        end_report(w);
    }

    static bool overlap(const char* address, size_t bytes, const void* from, int size) {
        return address < static_cast<const char*>(from) + size && static_cast<const char*>(from) < address + bytes;
    }

    static void name_access(Worker& w, const char* what, void* code, const char* file, int line) {
        begin_report(w, what);
        print(": thread %d at pc:%p, issued at %s:%d\n", w.current, code, file, line);
        end_report(w);
    }

    [[noreturn]] static void wrong(Worker& w, const char* what, const char* word, const char* file, int line) {
        begin_report(w, what);
        print(": thread %d in %s at %s:%d\n", w.current, word, file, line);
        end_report(w);
        __builtin_unreachable();
    }

    void check_equal(Worker& w, const Group& g, const Product* const* lanes, const char* word, const char* file, int line) const {
        const Product& first = *lanes[0];
        const char* what = nullptr;
        for (int t = 1; t < 128; ++t) {
            const Product& other = *lanes[t];
            if (other.a != first.a && !first.registers_a) what = "the descriptors of A differ between threads of a warpgroup";
            if (other.b != first.b) what = "the descriptors of B differ between threads of a warpgroup";
            if (other.accumulate != first.accumulate) what = "some threads of a warpgroup accumulate and some do not";
            if (other.multiply != first.multiply || other.registers != first.registers || other.transposed_a != first.transposed_a ||
                other.transposed_b != first.transposed_b || !other.registers_a != !first.registers_a)
                what = "threads of a warpgroup issue different products";
            if (g.commits[t] != g.commits[0] || g.retired[t] != g.retired[0])
                what = "threads of a warpgroup have committed or waited for different wgmma groups";
        }
        for (int t = 0; t < 128; ++t)
            if (!g.fenced[t]) what = "a wgmma without a wgmma_fence before it";
        if (what) wrong(w, what, word, file, line);
    }

    Issued& oldest(Worker& w, Group& g, const char* file, int line) {
        Issued& p = g.product[g.issued % ring];
        if (g.issued >= unsigned(ring) && p.left) wrong(w, "more than 512 products of a warpgroup in flight", "wgmma", file, line);
        return p;
    }

    static void check_descriptors(Worker& w, const Issued& p, const char* word, const char* file, int line) {
        const Descriptor* both[] = {&p.a, &p.b};
        for (int i = p.registers_a; i < 2; ++i) {
            const Descriptor& d = *both[i];
            const bool transposed = i ? p.transposed_b : p.transposed_a;
            const char* what = nullptr;
            if (d.mode != 1) what = "a descriptor without the 128-byte swizzle: the CPU engine knows no other";
            else if (d.stride % 1024) what = "a descriptor whose 8-row atoms are no multiple of 1024 bytes apart";
            else if (transposed && d.start % 128 + (i && p.columns < 64 ? p.columns : 64) * 2 > 128)
                what = "an MN-major descriptor whose columns cross the end of its rows";
            else if (transposed && i && p.columns > 64 && (!d.leading || d.leading % 1024))
                what = "an MN-major descriptor whose 64-column slabs are no multiple of 1024 bytes apart";
            else if (!transposed && d.start % 128 > 96) what = "a K-major descriptor whose 16 columns cross the end of its rows";
            else if (d.start % 1024 >= 128 && !transposed) what = "a K-major descriptor that starts inside an atom of 8 rows";
            if (what) wrong(w, what, word, file, line);
        }
    }

    // Calls chunk(matrix, row or column or (transposed) k, 8-element chunk, address) for the 16-byte chunks of A (0) and B (1).
    template <class Chunk> static void each_chunk(const Issued& p, Chunk chunk) {
        for (int k = 0; p.transposed_a && k < 16; ++k)
            for (int eighth = 0; eighth < 8; ++eighth) chunk(0, k, eighth, p.a.of_line(k, eighth));
        for (int row = 0; !p.registers_a && !p.transposed_a && row < 64; ++row)
            for (int half = 0; half < 2; ++half) chunk(0, row, half, p.a.of_row(row, half));
        if (p.transposed_b) {
            for (int k = 0; k < 16; ++k)
                for (int eighth = 0; eighth < p.columns / 8; ++eighth) chunk(1, k, eighth, p.b.of_line(k, eighth));
        } else {
            for (int row = 0; row < p.columns; ++row)
                for (int half = 0; half < 2; ++half) chunk(1, row, half, p.b.of_row(row, half));
        }
    }

    // Reads the operands: a[row][k], b[column][k], or b[k][column] where it is transposed. Returns a hash of them. word: of the issue, at
    // which they must have been written; null at the wait.
    static uint64_t gather(Worker& w, const Issued& p, unsigned short (*a)[16], unsigned short* b, const char* word) {
        uint64_t hash = 0x9e3779b97f4a7c15ull;
        each_chunk(p, [&](int matrix, int row, int part, uint32_t address) {
            const uint32_t at = address - shared_base;
            if (address < shared_base || at + 16 > w.launch->dynamic_bytes) {
                begin_report(w, "a wgmma reads outside shared memory");
                print(": thread %d in %s at %s:%d, byte %d of %u\n", w.current, word, p.file, p.line, int(at), w.launch->dynamic_bytes);
                end_report(w);
            }
            uint64_t bits[2];
            memcpy(bits, w.arena + at, 16);
            if (word && (bits[0] & bits[1]) == ~uint64_t(0)) unwritten(w, p, w.arena + at, matrix, word);
            hash = (hash ^ bits[0]) * 0xbf58476d1ce4e5b9ull;
            hash = (hash ^ hash >> 29 ^ bits[1]) * 0x94d049bb133111ebull;
            unsigned short turned[8];
            memcpy(turned, bits, 16);
            if (!matrix && p.transposed_a)
                for (int i = 0; i < 8; ++i) a[8 * part + i][row] = turned[i];
            else memcpy(matrix ? b + row * (p.transposed_b ? p.columns : 16) + 8 * part : &a[row][8 * part], bits, 16);
        });
        return hash;
    }

    static void unwritten(Worker& w, const Issued& p, const char* address, int matrix, const char* word);
    static void overwritten(Worker& w, const Issued& p, void* code);

    // The warp's part of the reads: its 16 rows of A, all of B.
    static void read_by(Worker& w, const Issued& p, int warp, int thread, Access_kind kind) {
        each_chunk(p, [&](int matrix, int row, int part, uint32_t address) {
            if (matrix || (p.transposed_a ? part / 2 : row / 16) == warp)
                w.race->access(w.arena + (address - shared_base), 16, false, p.code, w.first_clock + thread, kind);
        });
    }

    static void take_registers_a(Issued& p, const Product* const* lanes, unsigned short (*a)[16]) {
        for (int t = 0; t < 128; ++t) {
            p.a_at[t] = lanes[t]->registers_a;
            memcpy(p.a_value[t], p.a_at[t], 16);
            const int row = t / 32 * 16 + t % 32 / 4, k = t % 4 * 2;
            for (int i = 0; i < 4; ++i) memcpy(&a[row + i % 2 * 8][k + i / 2 * 8], &p.a_value[t][i], 4);
        }
    }

    // The accumulators of a product: in flight already, or taken from the threads' registers, which hold NaN from now on.
    int chained(Worker& w, Group& g, const Product* const* lanes, const char* word, const char* file, int line) {
        int found = -1;
        for (int i = 0; i < max_chains; ++i) {
            Chain& c = g.chain[i];
            if (!c.in_flight) {
                if (found < 0) found = i;
            } else if (c.d[0] == lanes[0]->d) {
                found = i;
                break;
            } else if (overlap(reinterpret_cast<char*>(lanes[0]->d), 4 * lanes[0]->registers, c.d[0], 4 * c.registers)) {
                wrong(w, "a wgmma whose accumulators are part of another's in flight", word, file, line);
            }
        }
        if (found < 0) wrong(w, "products on more than 8 accumulators in flight", word, file, line);
        Chain& c = g.chain[found];
        const bool fresh = !c.in_flight, zero = !lanes[0]->accumulate;
        if (!fresh && c.registers != lanes[0]->registers) wrong(w, "products of different shapes on one accumulator", word, file, line);
        c.registers = lanes[0]->registers;
        for (int t = 0; t < 128; ++t) {
            if (!fresh && c.d[t] != lanes[t]->d) wrong(w, "threads of a warpgroup name different accumulators", word, file, line);
            c.d[t] = lanes[t]->d;
            if (!fresh) check_poison(w, c, t, nullptr, file, line);
            else if (!zero) check_fenced(w, g, t, c.d[t], c.registers, word, file, line);
            for (int i = 0; (fresh || zero) && i < c.registers; ++i) element(c, t, i) = zero ? 0.0f : c.d[t][i];
            for (int i = 0; fresh && i < c.registers; ++i) memcpy(c.d[t] + i, &poison, 4);
        }
        c.in_flight = true;
        c.left = 128;
        c.file = file, c.line = line;
        return found;
    }

    // Register i of a thread: its row and column of D (PTX ISA, wgmma.mma_async, accumulator fragments).
    static float& element(Chain& c, int t, int i) { return c.value[t / 32][i / 4 * 8 + t % 4 * 2 + i % 2][t % 32 / 4 + i / 2 % 2 * 8]; }

    // code: of the wait; null where the next product at file:line sees it.
    static void check_poison(Worker& w, const Chain& c, int t, void* code, const char* file, int line) {
        for (int i = 0; i < c.registers; ++i) {
            uint32_t bits;
            memcpy(&bits, c.d[t] + i, 4);
            if (bits == poison) continue;
            begin_report(w, "an accumulator of a wgmma in flight was written");
            print(": register %d of thread %d, issued at %s:%d, seen at ", i, t % 128, c.file, c.line);
            code ? print("pc:%p\n", code) : print("%s:%d\n", file, line);
            end_report(w);
        }
    }

    void retire(Worker& w, Issued& p, int thread, void* code) {
        const int lane = thread % 128, warp = lane / 32;
        --p.left;
        if (!p.waited[warp]) {  // the latest moment at which this warp may still read: its first lane's wait
            p.waited[warp] = true;
            unsigned short a[64][16], b[max_columns * 16];
            if (gather(w, p, a, b, nullptr) != p.hash) overwritten(w, p, code);
        }
        if (p.registers_a && memcmp(p.a_at[lane], p.a_value[lane], 16)) {
            begin_report(w, "an A register of a wgmma in flight was written");
            print(": thread %d, issued at %s:%d, retired at pc:%p\n", thread, p.file, p.line, code);
            end_report(w);
        }
        if (!w.race) return;
        if (p.reader[warp] < 0) {
            read_by(w, p, warp, thread, by_async_proxy);
            p.reader[warp] = int16_t(thread);
            p.reader_clock[warp] = w.race->clocks->clock[w.first_clock + thread]++;
        } else {
            w.race->clocks->learn(w.first_clock + thread, w.first_clock + p.reader[warp], p.reader_clock[warp]);
        }
    }

    void write_back(Worker& w, Chain& c, int thread, void* code) {
        const int lane = thread % 128;
        check_poison(w, c, lane, code, c.file, c.line);
        for (int i = 0; i < c.registers; ++i) c.d[lane][i] = element(c, lane, i);
        Seen& own = seen(group[thread / 128], lane, c.d[lane], c.registers);
        memcpy(own.value, c.d[lane], 4 * size_t(c.registers));  // nobody has touched them since
        c.d[lane] = nullptr;
        if (--c.left == 0) c.in_flight = false;
    }
};

}  // namespace fa_host
