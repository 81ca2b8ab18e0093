// The calls that a decode step makes, kept with their arguments and made again one after the other (captured.py). Included by
// kernels.cpp, behind the functions that may be called so.

namespace {

constexpr int MOST_ARGUMENTS = 16;

struct CapturedCall {  // pointers as numbers, doubles by their bits. result: what the function returned; 0 where it returns nothing
    int64_t function, result, arguments[MOST_ARGUMENTS];
};

template <class A>
A argument(int64_t word) {
    if constexpr (std::is_pointer<A>::value) {
        return reinterpret_cast<A>(word);
    } else if constexpr (std::is_same<A, double>::value) {
        double number;
        memcpy(&number, &word, sizeof number);
        return number;
    } else {
        return A(word);
    }
}

template <class R, class... A, size_t... I>
int64_t apply(R (*function)(A...), const int64_t *words, std::index_sequence<I...>) {
    static_assert(sizeof...(A) <= MOST_ARGUMENTS, "a captured call has no room for so many arguments");
    if constexpr (std::is_void<R>::value) {
        function(argument<A>(words[I])...);
        return 0;
    } else {
        return function(argument<A>(words[I])...);
    }
}

template <class R, class... A>
constexpr size_t arity(R (*)(A...)) {
    return sizeof...(A);
}

template <auto function>
int64_t replayed(const int64_t *words) {
    return apply(function, words, std::make_index_sequence<arity(function)>());
}

struct Capturable {
    const char *name;
    int64_t (*replay)(const int64_t *words);
};

#define CAPTURABLE(name) {#name, replayed<name>}
const Capturable CAPTURABLES[] = {
    CAPTURABLE(rq_embed),
    CAPTURABLE(rq_concat_columns),
    CAPTURABLE(rq_add_norm),
    CAPTURABLE(rq_add),
    CAPTURABLE(rq_linear),
    CAPTURABLE(rq_mlp),
    CAPTURABLE(rq_mla_prologue),
    CAPTURABLE(rq_mla_absorbed),
    CAPTURABLE(rq_gqa_prologue),
    CAPTURABLE(rq_gqa_decode),
    CAPTURABLE(rq_route),
    CAPTURABLE(rq_experts),
    CAPTURABLE(rq_linear_packed),
    CAPTURABLE(rq_mlp_packed),
    CAPTURABLE(rq_mla_prologue_packed),
    CAPTURABLE(rq_experts_packed),
};

}  // namespace

extern "C" {

// The number by which captured calls name a function; -1: it cannot be captured.
int64_t rq_capturable(const char *name) {
    int64_t count = sizeof CAPTURABLES / sizeof *CAPTURABLES;
    for (int64_t i = 0; i < count; i++)
        if (!strcmp(CAPTURABLES[i].name, name)) return i;
    return -1;
}

// Returns the first call whose result is another than before, behind which no call is made; else `count`.
int64_t rq_replay(const CapturedCall *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (CAPTURABLES[calls[i].function].replay(calls[i].arguments) != calls[i].result) return i;
    return count;
}
}
