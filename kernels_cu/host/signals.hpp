// What ends a launch from outside: Ctrl-C, and a kernel's bad address or division by zero. Part of engine.cpp.
#pragma once

namespace fa_host {

constexpr int watched[] = {SIGINT, SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction before[4];  // how they were handled before the launch

// Ctrl-C: the launch is to end, and whoever handled it before (Python) is told too. A second one, which is not the same one
// sent twice, means that the launch does not end.
static void on_interrupt(int number, siginfo_t* info, void* context) {
    static timespec first;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!stop_asked) first = now;
    else if (now.tv_sec - first.tv_sec + (now.tv_nsec - first.tv_nsec) * 1e-9 > 0.3) _exit(130);
    stop_asked = 1;
    before[0].sa_flags& SA_SIGINFO ? before[0].sa_sigaction(number, info, context) : before[0].sa_handler(number);
}

// A fault of a kernel is reported and ends the launch; any other, one of the report itself too, is left to the old handler.
static void on_fault(int number, siginfo_t* info, void* context) {
    if (!here || here->faulted) {
        for (int i = 0; i < 4; ++i)
            if (watched[i] == number) sigaction(number, &before[i], nullptr);
        return;  // to the faulting instruction, which now meets the old handler
    }
    here->faulted = true;
    auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    auto code = machine.gregs[REG_RIP];
#else
    auto code = machine.pc;
#endif
    begin_report(*here, number == SIGFPE ? "integer division by zero" : "illegal memory access");
    say(": thread %d at pc:%p", here->current, reinterpret_cast<void*>(code + 1));  // as a return address: after the instruction
    if (number != SIGFPE) say(", address %p", info->si_addr);
    say("\n");
    end_report(*here);
}

static void watch_signals() {
    stop_asked = 0;
    for (int i = 0; i < 4; ++i) {
        struct sigaction old, ours = {};
        ours.sa_sigaction = i ? on_fault : on_interrupt;
        ours.sa_flags = SA_SIGINFO | (i ? SA_NODEFER : SA_RESTART);
        sigaction(watched[i], nullptr, &old);
        if (old.sa_sigaction != ours.sa_sigaction) before[i] = old;  // the same in a child forked during a launch
        bool handled = before[i].sa_handler != SIG_DFL && before[i].sa_handler != SIG_IGN;
        if (i ? !__sanitizer_start_switch_fiber : handled) sigaction(watched[i], &ours, nullptr);
    }
}

static void leave_signals() {
    for (int i = 0; i < 4; ++i) sigaction(watched[i], &before[i], nullptr);
}

}  // namespace fa_host
