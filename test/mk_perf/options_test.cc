// SPDX-License-Identifier: MIT
#include "options.h"
#include "errors.h"
#include "presets.h"
#include "test/support/catch.h"

using namespace perf;

namespace {

Options parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "mk-perf");
  return parse_options(static_cast<int>(arguments.size()), arguments.data());
}

// The sentence of the UsageError that `action` throws; "" when it throws none.
template <typename Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

std::string refusal_of(const std::vector<const char*>& arguments, int nranks = 2) {
  return refusal([&] {
    const Options options = parse(arguments);
    select_work(options, nranks);
    node_of_rank(options, nranks);
  });
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a full command line is understood") {
  const Options options = parse(
      {"gemm_allreduce", "--device",       "host",     "-g",          "4",        "--nodes", "2",
       "--shape",        "m=64,n=32,k=16", "--shape",  "k=1,m=2,n=3", "--dtype",  "fp16",    "--out-dtype",
       "fp32",           "--check",        "--iters",  "7",           "--warmup", "0",       "--mode",
       "back-to-back",   "--json",         "out.json", "--id-file",   "id"});
  CHECK(options.operator_name == "gemm_allreduce");
  CHECK(options.device == MK_DEVICE_HOST);
  CHECK(options.local_ranks == 4);
  CHECK(options.nodes == 2);
  CHECK(options.dtypes.dtype == MK_DTYPE_FP16);
  CHECK(options.dtypes.out_dtype == MK_DTYPE_FP32);
  CHECK(options.dtypes.comm_dtype == MK_DTYPE_FP16);
  CHECK(options.check);
  CHECK(options.iterations == 7);
  CHECK(options.warmup == 0);
  CHECK(options.modes == std::vector<Mode>{Mode::kBackToBack});
  CHECK(options.json_path == "out.json");
  CHECK(options.id_path == "id");
  const std::vector<Selection> work = select_work(options, 4);
  REQUIRE(work.size() == 1);
  REQUIRE(work[0].shapes.size() == 2);
  CHECK(work[0].shapes[1].text() == "m=2,n=3,k=1");
  CHECK(node_of_rank(options, 4) == std::vector<int32_t>{0, 0, 1, 1});
}

TEST_CASE("defaults") {
  const Options options = parse({"all"});
  CHECK(options.device == MK_DEVICE_AUTO);
  CHECK(!options.local_ranks);
  CHECK(!options.check);
  CHECK(options.iterations == 20);
  CHECK(options.modes == std::vector<Mode>{Mode::kIsolated});
  CHECK(options.baseline == Baseline::kAuto);
  CHECK(options.b_layout == MK_LAYOUT_KN);
  CHECK(!options.host_time);
  CHECK(!options.unfused);
  CHECK(!options.symmetric);
  CHECK(options.only.empty());
  CHECK(options.dtypes.out_dtype == MK_DTYPE_BF16);
  CHECK(select_work(options, 2).size() == all_operators().size());
  CHECK(node_of_rank(options, 2).empty());
}

TEST_CASE("what is measured beside the operator") {
  const Options options = parse({"gemm_allreduce", "--mode", "both", "--baseline", "nccl", "--nccl-library",
                                 "/a/libnccl.so", "--cublaslt-library", "/b/libcublasLt.so", "--b-layout", "nk",
                                 "--host-time", "--host-limit", "25", "--unfused"});
  CHECK(options.modes == std::vector<Mode>{Mode::kIsolated, Mode::kBackToBack});
  CHECK(options.baseline == Baseline::kNccl);
  CHECK(options.nccl_path == "/a/libnccl.so");
  CHECK(options.cublaslt_path == "/b/libcublasLt.so");
  CHECK(options.b_layout == MK_LAYOUT_NK);
  CHECK(options.host_time);
  CHECK(options.host_limit_us == 25);
  CHECK(contains(refusal_of({"all", "--host-limit", "25"}), "--host-limit: expected --host-time with it"));
  CHECK(options.unfused);
  CHECK(parse({"all", "--baseline", "none"}).baseline == Baseline::kNone);
}

TEST_CASE("a part of a preset") {
  const auto shapes = [](std::vector<const char*> only) {
    std::vector<const char*> arguments = {"gemm_reduce_scatter", "--preset", "llama3-70b"};
    for (const char* values : only) arguments.insert(arguments.end(), {"--only", values});
    std::string text;
    const std::vector<Selection> work = select_work(parse(arguments), 4);
    for (const Shape& shape : work.front().shapes) text += shape.text() + " ";
    return text;
  };
  CHECK(shapes({"m=4096"}) == "m=4096,n=8192,k=2048 m=4096,n=8192,k=7168 ");
  CHECK(shapes({"k=7168,m=1024"}) == "m=1024,n=8192,k=7168 ");
  CHECK(shapes({"k=7168,m=1024", "m=2048,k=2048"}) == "m=2048,n=8192,k=2048 m=1024,n=8192,k=7168 ");
  CHECK(contains(refusal_of({"all", "--preset", "square", "--only", "m=3"}), "--only \"m=3\": no shape"));
  CHECK(contains(refusal_of({"all", "--only", "m"}), "--only \"m\": expected key=value"));
  CHECK(contains(refusal_of({"all", "--only", "x=3"}), "no shape has these values"));
}

TEST_CASE("bad usage is refused with a sentence that says what was expected") {
  CHECK(contains(refusal_of({}), "which operator"));
  CHECK(contains(refusal_of({"gemm"}), "unknown operator \"gemm\"; expected one of allgather_gemm"));
  CHECK(contains(refusal_of({"all", "gemm_allreduce"}), "expected one operator"));
  CHECK(!refusal_of({"all", "--no-such-option"}).empty());
  CHECK(!refusal_of({"all", "--shape"}).empty());
  CHECK(contains(refusal_of({"all", "--device", "tpu"}), "--device: expected auto, host or cuda, saw \"tpu\""));
  CHECK(contains(refusal_of({"all", "--dtype", "fp32"}), "--dtype: expected bf16 or fp16"));
  CHECK(contains(refusal_of({"all", "--out-dtype", "fp8"}), "--out-dtype: expected bf16, fp16 or fp32"));
  CHECK(contains(refusal_of({"all", "--mode", "fast"}), "--mode"));
  CHECK(contains(refusal_of({"all", "--baseline", "mpi"}), "expected nccl, none or auto, saw \"mpi\""));
  CHECK(contains(refusal_of({"all", "--b-layout", "kk"}), "--b-layout: expected kn or nk"));
  CHECK(contains(refusal_of({"all", "--baseline", "nccl", "--device", "host"}), "NCCL needs GPUs"));
  CHECK(contains(refusal_of({"all", "-g", "0"}), "-g: expected an integer from 1"));
  CHECK(contains(refusal_of({"all", "-g", "-2"}), "-g"));
  CHECK(contains(refusal_of({"all", "-g", "two"}), "saw \"two\""));
  CHECK(contains(refusal_of({"all", "--iters", "0"}), "--iters"));
  CHECK(contains(refusal_of({"all", "--warmup", "-1"}), "--warmup"));
  CHECK(contains(refusal_of({"all", "--nodes", "3"}, 4), "does not divide the 4 ranks"));
  CHECK(contains(refusal_of({"all", "--nodes", "0"}), "--nodes"));
  CHECK(
      contains(refusal_of({"all", "--preset", "gpt"}), "expected one of gpu, square, llama3-70b, deepseek-v3"));
  CHECK(contains(refusal_of({"all", "--preset", "square", "--shape", "m=1,n=1,k=1"}), "give one of them"));
  CHECK(contains(refusal_of({"ring_attention", "--preset", "square"}), "has no shapes for ring_attention"));
  CHECK(contains(refusal_of({"gemm_allreduce", "--preset", "llama3-70b"}, 3), "3 ranks do not divide"));
  CHECK(contains(refusal_of({"all", "--json", ""}), "--json"));
  CHECK(contains(refusal_of({"all", "--trace", ""}), "--trace"));
}

TEST_CASE("bad shapes are refused with a sentence") {
  const auto refused = [](const char* shape) { return refusal_of({"gemm_allreduce", "--shape", shape}); };
  CHECK(refused("m=1,n=2,k=3") == "");
  CHECK(contains(refused(""), "expected key=value"));
  CHECK(contains(refused("m=1,n=2,k=3,"), "expected key=value, saw \"\""));
  CHECK(contains(refused("m"), "expected key=value, saw \"m\""));
  CHECK(contains(refused("=4"), "expected key=value"));
  CHECK(contains(refused("m=,n=2,k=3"), "m: expected an integer"));
  CHECK(contains(refused("m=-1,n=2,k=3"), "saw \"-1\""));
  CHECK(contains(refused("m=1x,n=2,k=3"), "saw \"1x\""));
  CHECK(contains(refused("m= 1,n=2,k=3"), "saw \" 1\""));
  CHECK(contains(refused("m=0,n=2,k=3"), "m: expected 1 to"));
  CHECK(contains(refused("m=99999999999999999999,n=2,k=3"), "m: expected an integer"));
  CHECK(contains(refused("m=1000000000000,n=1000000000000,k=3"), "2^60 bytes"));
  CHECK(contains(refused("m=1,m=1,n=2,k=3"), "given twice"));
  CHECK(contains(refused("m=1,n=2"), "key k is missing; gemm_allreduce takes m n k"));
  CHECK(contains(refused("m=1,n=2,k=3,tokens=4"), "gemm_allreduce has no key tokens; its keys are m n k"));
  const auto moe = [](const char* shape) { return refusal_of({"moe_dispatch_gemm", "--shape", shape}); };
  CHECK(moe("tokens=8,hidden=16,inter=8,experts=4,topk=2") == "");
  CHECK(contains(moe("tokens=8,hidden=16,inter=8,experts=4,topk=5"), "topk exceeds experts"));
  CHECK(contains(moe("tokens=8,hidden=15,inter=8,experts=4,topk=2"), "not a multiple of 8"));
  const auto attention = [](const char* shape) { return refusal_of({"ring_attention", "--shape", shape}); };
  CHECK(attention("batch=1,seq=64,heads=4,kv_heads=2,dim=64") == "");
  CHECK(contains(attention("batch=1,seq=64,heads=4,kv_heads=3,dim=64"), "kv_heads does not divide heads"));
  CHECK(contains(attention("batch=1,seq=64,heads=4,kv_heads=2,dim=64,zigzag=1"), "needs causal=1"));
  CHECK(contains(attention("batch=2,seq=64,heads=4,kv_heads=2,dim=64,packed=3"), "need batch=1"));
  CHECK(contains(attention("batch=1,seq=64,heads=4,kv_heads=2,dim=64,causal=2"), "causal: expected 0 to 1"));
}

TEST_CASE("with all, a shape is for the operators that know its keys") {
  CHECK(select_work(parse({"all", "--shape", "m=8,n=8,k=8"}), 2).size() == 4);
  CHECK(select_work(parse({"all", "--shape", "tokens=8,hidden=16,inter=8,experts=4,topk=2"}), 2).size() == 2);
  CHECK(contains(refusal_of({"all", "--shape", "x=8"}), "no operator has these keys"));
}

TEST_CASE("presets follow the splits of tensor parallelism") {
  CHECK(preset_shapes("square", "allgather_gemm", 4).front().text() == "m=2048,n=512,k=2048");
  CHECK(preset_shapes("square", "gemm_reduce_scatter", 4).back().text() == "m=32768,n=32768,k=8192");
  CHECK(preset_shapes("square", "gemm_allreduce", 4).size() == 5);
  CHECK(preset_shapes("square", "allgather_gemm_wgrad", 4).front().text() == "m=2048,n=2048,k=512");
  const std::vector<Shape> gather = preset_shapes("llama3-70b", "allgather_gemm", 4);
  CHECK(gather.front().text() == "m=1024,n=2560,k=8192");
  CHECK(gather.back().text() == "m=16384,n=14336,k=8192");
  const std::vector<Shape> decode = preset_shapes("llama3-70b", "gemm_allreduce", 4);
  CHECK(decode.front().text() == "m=16,n=8192,k=2048");
  CHECK(decode.back().text() == "m=1024,n=8192,k=7168");
  CHECK(preset_shapes("deepseek-v3", "moe_dispatch_gemm", 8).front().text() ==
        "tokens=8192,hidden=7168,inter=2048,experts=256,topk=8");
  const std::vector<Shape> ring = preset_shapes("ring-attention", "ring_attention", 4);
  REQUIRE(ring.size() == 10);
  CHECK(ring.front().text() == "batch=4,seq=6144,heads=16,kv_heads=16,dim=128,causal=0,zigzag=0,packed=0");
  CHECK(ring.back().text() == "batch=4,seq=98304,heads=16,kv_heads=16,dim=128,causal=1,zigzag=1,packed=0");
  CHECK(preset_shapes("ring-attention", "gemm_allreduce", 4).empty());
  for (const char* preset : {"default", "gpu", "square", "llama3-70b", "deepseek-v3", "ring-attention"}) {
    for (const int nranks : {1, 2, 4, 8, 16}) {
      CHECK(refusal_of({"all", "--preset", preset}, nranks) == "");
    }
  }
}
