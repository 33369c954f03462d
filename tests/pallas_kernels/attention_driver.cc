// The native attention without Python or XLA, for builds with sanitizers: every buffer has exactly its size, what no row
// may see is NaN, and results are compared with sums in double, between numbers of threads, and between a chunk and its
// tokens one by one.
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "attention_tasks.h"
#include "drivers.h"
#include "late_pool.h"

using namespace tierax;

namespace {

constexpr int64_t kLayers = 2, kLayer = 1;

struct Row {
  int64_t queries, length;
};

struct Case {
  std::vector<float> q;
  std::vector<char> pool;
  std::vector<int32_t> q_starts{0}, kv_lens, table;
  // K and V as they read, [row][position][kv_heads][2 * head_dim].
  std::vector<std::vector<double>> kv;
  Attention args{};
  Batch batch{};
  int64_t pages = 0;

  Case(KvType type, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t page_size, std::vector<Row> rows,
       int64_t window, float soft_cap, std::mt19937& random) {
    const int64_t row_bytes = type == KvType::kF32 ? 8 * head_dim : type == KvType::kBf16 ? 4 * head_dim : 2 * head_dim + 4;
    int64_t width = 0;
    for (Row row : rows) width = std::max(width, (row.length + page_size - 1) / page_size);
    pages = width * int64_t(rows.size());
    // All bits set are NaN as f32 and as bf16, and scales that are NaN.
    pool.assign(pages * kLayers * page_size * kv_heads * row_bytes, char(0xFF));
    table.resize(pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    std::normal_distribution<float> normal;
    for (size_t r = 0; r < rows.size(); ++r) {
      q_starts.push_back(q_starts.back() + int32_t(rows[r].queries));
      kv_lens.push_back(int32_t(rows[r].length));
      kv.emplace_back();
      for (int64_t i = 0; i < rows[r].length * kv_heads; ++i) {
        const int64_t position = i / kv_heads, page = table[r * width + position / page_size];
        const int64_t slot = (page * kLayers + kLayer) * page_size + position % page_size;
        char* row = pool.data() + (slot * kv_heads + i % kv_heads) * row_bytes;
        for (int64_t d = 0; d < 2 * head_dim; ++d) kv.back().push_back(store(type, row, d, head_dim, normal, random));
      }
    }
    for (int64_t i = 0; i < q_starts.back() * heads * head_dim; ++i) q.push_back(normal(random));
    args = {q.data(), nullptr, pool.data(), type, heads, head_dim, kLayers, page_size, kv_heads, row_bytes, kLayer,
            window, soft_cap, 1 / std::sqrt(float(head_dim))};
    batch = {q_starts.data(), kv_lens.data(), table.data(), int64_t(rows.size()), width, q_starts.back()};
  }

  static double store(KvType type, char* row, int64_t d, int64_t head_dim, std::normal_distribution<float>& normal,
                      std::mt19937& random) {
    float value = normal(random);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (type == KvType::kF32) {
      std::memcpy(row + 4 * d, &value, 4);
      return value;
    }
    if (type == KvType::kBf16) {
      const uint16_t half = uint16_t(bits >> 16);
      std::memcpy(row + 2 * d, &half, 2);
      bits = uint32_t{half} << 16;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    // K at a scale of 1 / 4, V at one of 1 / 2.
    const uint16_t scales[2] = {0x3E80, 0x3F00};
    std::memcpy(row + 2 * head_dim, scales, 4);
    const uint8_t code = uint8_t(random() % 0x50 | (random() % 2 << 7));
    row[d] = char(code);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return (code & 0x80 ? -magnitude : magnitude) * (d < head_dim ? 0.25 : 0.5);
  }

  // Of a batch of this one's rows, whose first token is that.
  std::vector<float> run(const Kernels& kernels, int threads, const Batch& some, int64_t first_token = 0) const {
    std::vector<float> result(some.tokens * args.heads * args.head_dim, std::numeric_limits<float>::quiet_NaN());
    Attention mine = args;
    mine.out = result.data();
    mine.q = q.data() + first_token * args.heads * args.head_dim;
    LatePool pool_of_threads(threads);
    run_attention(kernels, pool_of_threads, mine, some);
    // A copy, made before the helpers are joined: see linear_driver.cc.
    return std::vector<float>(result);
  }

  std::vector<double> exact(int64_t row, int64_t query, int64_t head) const {
    const int64_t dims = args.head_dim, position = kv_lens[row] - (q_starts[row + 1] - q_starts[row]) + query;
    const int64_t first = args.window ? std::max<int64_t>(0, position + 1 - args.window) : 0;
    const float* mine = q.data() + ((q_starts[row] + query) * args.heads + head) * dims;
    std::vector<double> mixed(dims), scores;
    for (int64_t p = first; p <= position; ++p) {
      const double* key = kv[row].data() + (p * args.kv_heads + head / args.group()) * 2 * dims;
      double score = std::inner_product(mine, mine + dims, key, 0.0) * args.scale;
      scores.push_back(args.soft_cap ? args.soft_cap * std::tanh(score / args.soft_cap) : score);
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int64_t p = first; p <= position; ++p) {
      const double weight = std::exp(scores[p - first] - top);
      const double* value = kv[row].data() + (p * args.kv_heads + head / args.group()) * 2 * dims + dims;
      total += weight;
      for (int64_t d = 0; d < dims; ++d) mixed[d] += weight * value[d];
    }
    for (double& m : mixed) m /= total;
    return mixed;
  }
};

bool same(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(float)) == 0;
}

bool check(const Kernels& kernels, const Case& c) {
  if (std::string wrong = fault(c.args, c.batch, c.pages); !wrong.empty()) {
    std::printf("refused: %s\n", wrong.c_str());
    return false;
  }
  const int64_t token = c.args.heads * c.args.head_dim;
  const std::vector<float> out = c.run(kernels, 1, c.batch);
  for (int threads : {2, 5}) {
    if (!same(c.run(kernels, threads, c.batch).data(), out.data(), int64_t(out.size()))) {
      std::printf("%s: %d threads give other numbers\n", kernels.isa, threads);
      return false;
    }
  }
  for (int64_t r = 0; r < c.batch.rows; ++r) {
    const int64_t queries = c.q_starts[r + 1] - c.q_starts[r];
    for (int64_t i = 0; i < queries; ++i) {
      const float* mine = out.data() + (c.q_starts[r] + i) * token;
      for (int64_t h = 0; h < c.args.heads; ++h) {
        const std::vector<double> exact = c.exact(r, i, h);
        for (int64_t d = 0; d < c.args.head_dim; ++d) {
          if (!(std::fabs(mine[h * c.args.head_dim + d] - exact[d]) < 3e-5)) {
            std::printf("%s, KV %d, head_dim %ld: row %ld, query %ld, head %ld, [%ld] is %g, not %g\n", kernels.isa,
                        int(c.args.type), long(c.args.head_dim), long(r), long(i), long(h), long(d),
                        mine[h * c.args.head_dim + d], exact[d]);
            return false;
          }
        }
      }
      const int32_t starts[2] = {0, 1}, length = int32_t(c.kv_lens[r] - queries + i + 1);
      const Batch alone{starts, &length, c.table.data() + r * c.batch.table_width, 1, c.batch.table_width, 1};
      if (!same(c.run(kernels, 2, alone, c.q_starts[r] + i).data(), mine, token)) {
        std::printf("%s: row %ld, query %ld alone gives other numbers\n", kernels.isa, long(r), long(i));
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  const std::vector<Row> mixed{{40, 150}, {3, 3}, {1, 1}, {1, 128}, {1, 700}};
  struct {
    int64_t heads, kv_heads, head_dim, page_size, window;
    float soft_cap;
    std::vector<Row> rows;
  } shapes[] = {{4, 2, 16, 16, 0, 0, mixed},  {3, 1, 64, 16, 0, 0, {{1, 1100}}}, {9, 3, 8, 1, 50, 0, mixed},
                {8, 1, 13, 7, 0, 20, mixed},  {3, 3, 80, 256, 129, 5, mixed},    {2, 2, 16, 16, 1, 0, mixed},
                {5, 1, 24, 3, 0, 0, {{130, 600}}}, {4, 2, 16, 16, 0, 0, {}}};
  return check_kernels([&](const Kernels& kernels, std::mt19937& random) {
    for (auto& s : shapes)
      for (KvType type : {KvType::kF32, KvType::kBf16, KvType::kE4m3}) {
        Case c(type, s.heads, s.kv_heads, s.head_dim, s.page_size, s.rows, s.window, s.soft_cap, random);
        if (!check(kernels, c)) return false;
      }
    return true;
  });
}
