// Turns: blocks that add to the same place in an order (fa/atomic.cuh). A turn is a number in global memory: who may add next.
//
// A thread that waits for a turn lets the others of its block run. What it has taken is kept until it passes it on: passed by a thread that
// does not have it, under a bulk reduction that is not complete, or with a bulk reduction behind no proxy fence, it is a fault here, where a
// GPU would add in another order now and then.
#pragma once

#include <stdint.h>
#include <unistd.h>

#include "async.hpp"
#include "block.hpp"
#include "engine.hpp"
#include "global.hpp"
#include "interleave.hpp"
#include "report.hpp"
#include "scheduler.hpp"

namespace fa_host {

static inline void new_block_turns(Worker& w) {
    w.await_turn = w.only_turns = 0;
    for (int t = 0; t < w.threads; ++t) w.turns[t] = {{nullptr, nullptr}, true};
}

static inline void somebody_goes_on(Worker& w) {
    if (w.only_turns) __atomic_fetch_sub(&job->waiting, 1, __ATOMIC_RELAXED);
    w.only_turns = 0;
}

}  // namespace fa_host

// -- the functions that words call ------------------------------------------------------------------------------------

extern "C" {

void fa_host_proxy_fence_global() {
    using namespace fa_host;
    this_worker->turns[this_worker->current].fenced = true;
    if (global.on) global.proxy_fence(*this_worker, own_clock());
}

int fa_host_has_turn(const int* turn, int mine) {
    using namespace fa_host;
    Worker& w = *this_worker;
    if (__atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine) {  // that it has not come may be too early to say
        if (global.on) global.access(w, turn, 4, false, __builtin_return_address(0), own_clock(), by_atomic);
        return false;
    }
    if (global.on) global.speaks(w, turn, acquires, __builtin_return_address(0), own_clock(), [] {});
    Turns& turns = w.turns[w.current];
    if (turns.at[0] != turn) turns.at[1] = turns.at[0], turns.at[0] = turn;
    turns.fenced = false;
    return true;
}

// The block waited for runs on another worker, or has run on this one. Where all workers wait, and go on doing so, it is one that has not
// begun: on a GPU it might never begin either.
void fa_host_await_turn(const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    abort_if_interrupted(w);
    int others = 0;
    for (int i = 0; i < w.warps; ++i) others += __builtin_popcount(w.warp[i].ready);
    // Without others than those that wait for a turn too it is the latest moment for what is in flight.
    const bool alone = others <= w.await_turn++ && !unpark(w) && !deliver_one(w);
    if (interleaved.on && !interleaved.stuck) {  // the others may do no more than peek at mbarriers, until the turn has come
        if (alone || ++interleaved.awaits % 256 == 0) wait_for_others(w);
        return;
    }
    if (!alone) somebody_goes_on(w);
    else if (!w.only_turns++) __atomic_fetch_add(&job->waiting, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&job->waiting, __ATOMIC_RELAXED) < __atomic_load_n(&job->working, __ATOMIC_RELAXED)) w.only_turns = alone;
    if (job->meeting.come && interleaved.stuck)
        fa_host_fail("grid_barrier: all blocks that are left wait, this one for blocks that have ended or wait elsewhere", file, line);
    if (w.only_turns == 20000 || interleaved.stuck)
        fa_host_fail("wait_for_turn: all blocks that run wait, this one for the turn of one that has not begun", file, line);
    if (alone) usleep(100);
}

void fa_host_end_await() { --fa_host::this_worker->await_turn; }

// Fails where a thread passes a turn that it does not have, or under a bulk reduction that it has begun with it and not waited for.
void fa_host_pass_turn(int* turn, int next, const char* file, int line) {
    using namespace fa_host;
    Worker& w = *this_worker;
    may_switch(w);
    Turns& turns = w.turns[w.current];
    if (turns.at[0] != turn && turns.at[1] != turn) fa_host_fail("pass_turn: this thread has not waited for this turn", file, line);
    turns.at[turns.at[0] != turn] = nullptr;
    if (w.async && w.async->adds_under(w, turn))
        fa_host_fail("pass_turn: a bulk reduction that began in this turn is not complete: bulk_wait comes before", file, line);
    const auto pass = [&] { __atomic_store_n(turn, next, __ATOMIC_RELEASE); };
    global.on ? global.speaks(w, turn, releases, __builtin_return_address(0), own_clock(), pass) : pass();
    may_switch(w);
}

}  // extern "C"
