// The gradient of attention() as a C++ node of torch's autograd: what _Eager of operator.py does for calls that are like one before, without
// Python. native.py compiles this file against torch's headers, and operator.py takes its own way where that is not possible.
//
// A backward call looks up a Plan by what its tensors are like: all parameters of the launches, packed once by Python. It makes the outputs,
// writes their addresses into a copy of the parameters and launches. Any other call, and any failure, goes to the operator fa::backward,
// which is Python and says what is wrong.

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <pthread.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t MOST_BYTES = 4096, MOST_PARAMETERS = 64, MOST_ADDRESSES = 64, MOST_PLANS = 1024;

// -- the CUDA driver, by addresses that Python has from ctypes ----------------------------------------------------------

struct Attribute {  // CUlaunchAttribute of cuda.h
    int id, pad, value[16];
};

struct Config {  // CUlaunchConfig of cuda.h
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};

struct Driver {
    int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    int (*launch_ex)(const Config*, void*, void**, void**);
    int (*fill)(uint64_t, unsigned char, size_t, void*);
    int (*move)(void* map, uint64_t address);
    int (*context)(void**);
    int (*capturing)(void* stream, int*);
    int (*stream)(int32_t device, void**);  // torch's current one
};

// -- plans -------------------------------------------------------------------------------------------------------------

struct Launch {
    int64_t function, grid[3], block, shared, attribute, first, count;  // count parameters from the first on
};

// A backward pass for tensors of certain shapes and strides. Sizes are checked where it is made.
struct Plan {
    int64_t number = 0;
    void* context = nullptr;  // of CUDA; null on the CPU, where Python launches
    int64_t room = 0;  // bytes of the workspaces of a call
    bool keeps = false;  // whether it has workspaces that are kept for its stream
    std::vector<int64_t> spaces;  // offsets in them, or addresses of what is kept, as the complement
    std::vector<int64_t> at;  // the word of the parameters that each address goes to
    std::vector<int64_t> maps;  // byte of each tensor map, and which address is its tensor's, in turns
    std::vector<int64_t> fills;  // which address is zeroed first, and how many bytes, in turns
    std::vector<Launch> launches;
    std::vector<int64_t> parameters;  // byte of each
    std::vector<unsigned char> bytes;  // all of the parameters, with no addresses yet
};

struct Options {
    bool causal, deterministic;
    std::optional<double> scale;
    std::optional<int64_t> causal_shift;
    std::string kernel;
};

// What a plan is for: the options, a stream's handle + 1 where it keeps workspaces (else 0), and the tensors' type, device, sizes and strides.
using Signature = std::vector<int64_t>;

struct Hash {
    size_t operator()(const Signature& of) const {
        uint64_t hash = of.size();
        for (int64_t number : of) hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
        return hash;
    }
};

struct State {
    std::mutex lock, keeping;  // keeping: one pass after the other on a stream, of those that find there what the one before left
    std::vector<std::unique_ptr<Options>> options;
    std::unordered_map<Signature, std::shared_ptr<Plan>, Hash> plans;  // a null one: Python's alone
    Driver driver{};
    int (*learn)(const int64_t* signature, int64_t count, const int64_t* addresses, void* stream) = nullptr;
    int (*enqueue)(int64_t number, const int64_t* addresses) = nullptr;
};

State& state() {
    static State* made = new State;  // never deleted: a thread of torch's may outlive static objects
    return *made;
}

template <class Call>
int run(const Plan& plan, int64_t* addresses, void* stream, Call&& refused) {
    const Driver& driver = state().driver;
    alignas(64) unsigned char bytes[MOST_BYTES];
    std::memcpy(bytes, plan.bytes.data(), plan.bytes.size());
    for (size_t i = 0; i < plan.at.size(); ++i) std::memcpy(bytes + 8 * plan.at[i], &addresses[i], 8);
    for (size_t i = 0; i < plan.maps.size(); i += 2)
        if (driver.move(bytes + plan.maps[i], addresses[plan.maps[i + 1]])) return refused();
    for (size_t i = 0; i < plan.fills.size(); i += 2)
        if (driver.fill(addresses[plan.fills[i]], 0, plan.fills[i + 1], stream)) return refused();
    void* pointers[MOST_PARAMETERS];
    for (size_t i = 0; i < plan.parameters.size(); ++i) pointers[i] = bytes + plan.parameters[i];
    for (const Launch& l : plan.launches) {
        void* function = reinterpret_cast<void*>(l.function);
        unsigned x = l.grid[0], y = l.grid[1], z = l.grid[2], block = l.block, shared = l.shared;
        int error;
        if (l.attribute) {  // of cuLaunchKernelEx
            Attribute set{int(l.attribute), 0, {1}};
            Config config{{x, y, z}, {block, 1, 1}, shared, stream, &set, 1};
            error = driver.launch_ex(&config, function, pointers + l.first, nullptr);
        } else {
            error = driver.launch(function, x, y, z, block, 1, 1, shared, stream, pointers + l.first, nullptr);
        }
        if (error) return refused();
    }
    return 1;
}

// -- a backward call ---------------------------------------------------------------------------------------------------

// Whether the dispatcher would do no more for these tensors than call the device's entry, and nobody listens: _plain and _watched of operator.py.
bool plain(const variable_list& given) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    if (!(local.included_ - c10::default_included_set - c10::autocast_dispatch_keyset).empty()) return false;
    if (c10::impl::TorchDispatchModeTLS::any_modes_set() || at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return false;
    static const c10::DispatchKeySet cpu = at::empty({0}, at::kCPU).key_set();
    c10::DispatchKeySet usual = cpu;
    if (given[0].is_cuda()) {
        static const c10::DispatchKeySet cuda = at::empty({0}, at::kCUDA).key_set();
        usual = cuda;
    } else if (!given[0].is_cpu()) {
        return false;
    }
    for (const at::Tensor& tensor : given)
        if (tensor.key_set().raw_repr() & ~usual.raw_repr() || tensor.device() != given[0].device()) return false;
    return true;
}

struct Attention : torch::autograd::Function<Attention> {
    struct Made {
        at::Tensor o, lse;
    };

    static variable_list forward(AutogradContext* ctx, at::Tensor q, at::Tensor k, at::Tensor v, const Made& made, int64_t options) {
        ctx->save_for_backward({q, k, v, made.o, made.lse});
        ctx->set_materialize_grads(false);  // an output that nobody uses has no gradient, rather than one of zeros
        ctx->saved_data["options"] = options;
        return {made.o, made.lse};
    }

    static variable_list backward(AutogradContext* ctx, variable_list gradients) {
        variable_list given = ctx->get_saved_variables(), made;
        const at::Tensor &o = given[3], &dlse = gradients[1];
        if (!gradients[0].defined() && !dlse.defined()) return variable_list(5);
        given.insert(given.begin(), gradients[0].defined() ? gradients[0] : at::zeros_like(o));
        if (dlse.defined()) given.push_back(dlse);
        const int64_t options = ctx->saved_data["options"].toInt();
        if (c10::GradMode::is_enabled() || !fast(given, options, made)) slow(given, options, made);
        made.resize(5);
        for (size_t i = 0; i < 3; ++i)
            if (!ctx->needs_input_grad(i)) made[i] = at::Tensor();
        return made;
    }

    // given: dO, q, k, v, O, logsumexp and, where it has one, its gradient. made: dQ, dK, dV. False, with nothing enqueued that matters.
    static bool fast(const variable_list& given, int64_t options, variable_list& made) {
        if (!plain(given)) return false;
        const at::Tensor &q = given[1], &lse = given[5];
        for (size_t i = 0; i < given.size(); ++i) {
            const bool score = i >= 5;
            if (given[i].scalar_type() != (score ? lse : q).scalar_type() || given[i].dim() != (score ? 3 : 4)) return false;
            if (score && (!given[i].is_contiguous() || given[i].sizes() != lse.sizes())) return false;
        }
        State& known = state();
        void* stream = nullptr;
        if (lse.sizes() != q.sizes().slice(0, 3)) return false;
        if (q.is_cuda() && (!known.driver.stream || known.driver.stream(q.device().index(), &stream))) return false;
        Signature signature{options, 0, static_cast<int64_t>(q.scalar_type()), q.is_cuda() ? q.device().index() : -1,
                            static_cast<int64_t>(given.size())};
        signature.reserve(5 + 5 * 8);
        for (size_t i = 0; i < 5; ++i) {
            signature.insert(signature.end(), given[i].sizes().begin(), given[i].sizes().end());
            signature.insert(signature.end(), given[i].strides().begin(), given[i].strides().end());
        }
        auto plan = find(signature, stream);
        if (!plan) {
            int64_t addresses[MOST_ADDRESSES];
            for (size_t i = 0; i < given.size(); ++i) addresses[i] = reinterpret_cast<int64_t>(given[i].data_ptr());
            signature[1] = reinterpret_cast<int64_t>(stream) + 1;
            if (!known.learn(signature.data(), signature.size(), addresses, stream)) return false;
            signature[1] = 0;
            if (!(plan = find(signature, stream))) return false;
        }
        return *plan && enqueue(**plan, given, stream, made);
    }

    // Of any stream, or of this one. Nothing where none was looked for yet.
    static std::optional<std::shared_ptr<Plan>> find(Signature& signature, void* stream) {
        State& known = state();
        std::lock_guard<std::mutex> guard(known.lock);
        auto found = known.plans.find(signature);
        if (found == known.plans.end()) {
            signature[1] = reinterpret_cast<int64_t>(stream) + 1;
            found = known.plans.find(signature);
            signature[1] = 0;
        }
        if (found == known.plans.end()) return std::nullopt;
        return found->second;
    }

    static bool enqueue(const Plan& plan, const variable_list& given, void* stream, variable_list& made) {
        State& known = state();
        if (plan.context) {
            void* current = nullptr;
            if (known.driver.context(&current) || current != plan.context) return false;  // another GPU's, or a thread without one
            int capturing = 0;  // a graph has workspaces of its own: it may be replayed beside calls and other graphs
            if (plan.keeps && stream && (known.driver.capturing(stream, &capturing) || capturing)) return false;
        }
        const at::AutoDispatchBelowADInplaceOrView below;
        for (size_t i = 1; i < 4; ++i) made.push_back(at::empty(given[i].sizes(), given[i].options()));
        at::Tensor space;
        if (plan.room) space = at::empty({plan.room}, given[1].options().dtype(at::kByte));
        const int64_t start = plan.room ? reinterpret_cast<int64_t>(space.data_ptr()) : 0;
        int64_t addresses[MOST_ADDRESSES], bits = 0;
        size_t count = 0;
        auto add = [&](const at::Tensor& tensor) { bits |= addresses[count++] = reinterpret_cast<int64_t>(tensor.data_ptr()); };
        for (size_t i : {1, 2, 3, 4, 0}) add(given[i]);  // as READS of problem.py
        for (const at::Tensor& each : made) add(each);
        for (size_t i = 5; i < given.size(); ++i) add(given[i]);
        for (int64_t offset : plan.spaces) addresses[count++] = offset < 0 ? ~offset : start + offset;
        auto refused = [&] {
            made.clear();
            return 0;
        };
        if (bits & 15) return refused();  // rows as <fa/args.cuh> needs them
        std::unique_lock<std::mutex> alone(known.keeping, std::defer_lock);
        if (plan.keeps) alone.lock();
        if (plan.context) return run(plan, addresses, stream, refused);
        return known.enqueue(plan.number, addresses) || refused();
    }

    static void slow(const variable_list& given, int64_t options, variable_list& made) {
        static const c10::OperatorHandle operator_ = c10::Dispatcher::singleton().findSchemaOrThrow("fa::backward", "");
        const Options* of = nullptr;
        {
            std::lock_guard<std::mutex> guard(state().lock);
            of = state().options.at(options).get();
        }
        c10::Stack stack(given.begin(), given.begin() + 6);
        stack.emplace_back(of->causal);
        stack.emplace_back(of->scale);
        stack.emplace_back(of->kernel);
        stack.emplace_back(of->deterministic);
        stack.emplace_back(of->causal_shift);
        stack.emplace_back(given.size() > 6 ? c10::IValue(given[6]) : c10::IValue());
        if (c10::GradMode::is_enabled()) {
            operator_.callBoxed(stack);  // a second derivative is an error
        } else {
            const at::AutoDispatchBelowAutograd below;
            operator_.callBoxed(stack);
        }
        made.clear();
        for (const c10::IValue& each : stack) made.push_back(each.toTensor());
    }
};

// O and logsumexp, which a forward pass wrote, with the gradient behind them.
std::tuple<at::Tensor, at::Tensor> attach(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor o, at::Tensor lse, int64_t options) {
    variable_list made = Attention::apply(q, k, v, Attention::Made{o, lse}, options);
    return {made[0], made[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fa, library) {
    library.def("attach(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, int options) -> (Tensor, Tensor)", attach);
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fa_node_begin(const void* learn, const void* enqueue) {
    State& known = state();
    std::memcpy(&known.learn, &learn, sizeof learn);
    std::memcpy(&known.enqueue, &enqueue, sizeof enqueue);
    static const int once = pthread_atfork([] { state().lock.lock(); }, [] { state().lock.unlock(); }, [] { state().lock.unlock(); });
    (void)once;
}

EXPORT void fa_node_driver(const void* const* functions) { std::memcpy(&state().driver, functions, sizeof(Driver)); }

EXPORT int64_t fa_node_options(int causal, const double* scale, const char* kernel, int deterministic, const int64_t* causal_shift) {
    auto made = std::make_unique<Options>();
    made->causal = causal, made->deterministic = deterministic, made->kernel = kernel;
    if (scale) made->scale = *scale;
    if (causal_shift) made->causal_shift = *causal_shift;
    std::lock_guard<std::mutex> guard(state().lock);
    state().options.push_back(std::move(made));
    return static_cast<int64_t>(state().options.size()) - 1;
}

// numbers: of each list its length and its elements: context, room and keeps; then the lists of Plan in their order, a launch as its
// nine numbers. Null: Python's alone.
// Returns 0 where it does not fit.
EXPORT int fa_node_plan(const int64_t* signature, int64_t count, int64_t number, const int64_t* numbers, const unsigned char* bytes,
                        int64_t size) {
    std::shared_ptr<Plan> plan;
    if (numbers) {
        plan = std::make_shared<Plan>();
        auto list = [&] {
            const int64_t* first = numbers + 1;
            numbers = first + *numbers;
            return std::vector<int64_t>(first, numbers);
        };
        const auto head = list();
        plan->number = number;
        plan->context = reinterpret_cast<void*>(head[0]), plan->room = head[1], plan->keeps = head[2];
        plan->spaces = list(), plan->at = list(), plan->maps = list(), plan->fills = list();
        const auto launches = list();
        for (size_t i = 0; i < launches.size(); i += 9) {
            const int64_t* l = &launches[i];
            plan->launches.push_back({l[0], {l[1], l[2], l[3]}, l[4], l[5], l[6], l[7], l[8]});
        }
        plan->parameters = list();
        plan->bytes.assign(bytes, bytes + size);
        if (plan->bytes.size() > MOST_BYTES || plan->parameters.size() > MOST_PARAMETERS || plan->spaces.size() + 10 > MOST_ADDRESSES)
            return 0;
    }
    std::lock_guard<std::mutex> guard(state().lock);
    if (state().plans.size() >= MOST_PLANS) state().plans.clear();
    state().plans[Signature(signature, signature + count)] = std::move(plan);
    return 1;
}
