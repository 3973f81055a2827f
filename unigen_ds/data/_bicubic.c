/* Bicubic resizing of RGB pictures with Pillow's arithmetic, to the bit, several numbers at a time.

The rule: the rows first, then the columns. A pass computes each pixel from its neighbours in the input, weighted by the
cubic of Keys (a = -0.5), stretched where the picture becomes smaller. Weights are sums of doubles that are rounded to
22 fractional bits; a pass adds products of whole numbers and rounds to 8 bits. Sums of whole numbers do not depend on
their order, so a processor may add as it likes.

Pictures are read and written where Pillow keeps them: 4 bytes a pixel, by the Arrow C data interface
(https://arrow.apache.org/docs/format/CDataInterface.html). resampling.py has the Python side. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { BITS = 22, LANES = 8, ROUND = 1 << (BITS - 1) };

/* A pixel is a number: red in its lowest byte, then green and blue. */
typedef uint32_t Pixels __attribute__((vector_size(4 * LANES)));
typedef int32_t Numbers __attribute__((vector_size(4 * LANES)));

/* https://arrow.apache.org/docs/format/CDataInterface.html#structure-definitions */
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

/* Of each pixel of a side: its first neighbour, and the weights of `taps` neighbours. */
typedef struct {
    int taps;
    int *first;
    int32_t *weights;
} Side;

static double cubic(double x) {
    x = fabs(x);
    if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1;
    if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * -0.5;
    return 0.0;
}

/* The pixels low..high of a side of `given` pixels become `made` ones.
   0: done; 1: no memory; 2: the side is shorter than the neighbours of one pixel. */
static int neighbours(Side *side, int given, float low, float high, int made) {
    double scale = (double)(high - low) / made, wide = scale < 1.0 ? 1.0 : scale, reach = 2.0 * wide;
    int taps = side->taps = (int)ceil(reach) * 2 + 1;
    if (taps > given) return 2;
    side->first = malloc(sizeof(int) * (size_t)made);
    side->weights = calloc((size_t)made * (size_t)taps, sizeof(int32_t));
    double *exact = malloc(sizeof(double) * (size_t)taps);
    if (!side->first || !side->weights || !exact) {
        free(exact);
        return 1;
    }
    for (int i = 0; i < made; i++) {
        double center = low + (i + 0.5) * scale, sum = 0.0;
        int from = (int)(center - reach + 0.5), to = (int)(center + reach + 0.5);
        if (from < 0) from = 0;
        if (to > given) to = given;
        for (int at = from; at < to; at++) sum += exact[at - from] = cubic((at - center + 0.5) * (1.0 / wide));
        int first = from < given - taps ? from : given - taps; /* `taps` pixels from there are inside of the picture */
        int32_t *weights = side->weights + (size_t)i * (size_t)taps + (from - first);
        side->first[i] = first;
        for (int at = from; at < to; at++) {
            double weight = (sum != 0.0 ? exact[at - from] / sum : exact[at - from]) * (1 << BITS);
            *weights++ = (int32_t)(weight < 0 ? weight - 0.5 : weight + 0.5);
        }
    }
    free(exact);
    return 0;
}

/* Vectors of pixels, `stride` pixels from each other, and a weight of each. The vectors are as long as a processor of
   today has them; the compiler divides them for others. */
#define WEIGHTED(found, given, stride, weights, taps)                               \
    {                                                                               \
        Numbers red = {0}, green = {0}, blue = {0};                                 \
        for (int tap = 0; tap < (taps); tap++) {                                    \
            Pixels pixels;                                                          \
            memcpy(&pixels, (given) + (size_t)tap * (stride), sizeof pixels);       \
            red += (Numbers)(pixels & 255) * (weights)[tap];                        \
            green += (Numbers)(pixels >> 8 & 255) * (weights)[tap];                 \
            blue += (Numbers)(pixels >> 16 & 255) * (weights)[tap];                 \
        }                                                                           \
        found = ROUNDED(red) | ROUNDED(green) << 8 | ROUNDED(blue) << 16;           \
    }
#define POSITIVE(sum) ((sum) & ~((sum) >> 31))
#define ROUNDED(sum) (Pixels)(255 - POSITIVE(255 - POSITIVE((sum + ROUND) >> BITS)))

/* `rows` rows: of `width` pixels of `given`, and of `columns` pixels of `made`. 0: done; 1: no memory. */
FOR_EACH_PROCESSOR
static int across(const uint32_t *given, int width, uint32_t *made, int columns, int rows, const Side *side) {
    uint32_t *turned = malloc(sizeof(uint32_t) * LANES * (size_t)width); /* LANES rows, column by column */
    if (!turned) return 1;
    for (int row = 0; row < rows; row += LANES) {
        int together = rows - row < LANES ? rows - row : LANES;
        for (int i = 0; i < LANES; i++) {
            const uint32_t *in = given + (size_t)(row + (i < together ? i : 0)) * (size_t)width;
            for (int x = 0; x < width; x++) turned[(size_t)x * LANES + (size_t)i] = in[x];
        }
        uint32_t *out = made + (size_t)row * (size_t)columns;
        for (int x = 0; x < columns; x++) {
            Pixels found;
            WEIGHTED(found, turned + (size_t)side->first[x] * LANES, LANES, side->weights + (size_t)x * (size_t)side->taps,
                     side->taps)
            for (int i = 0; i < together; i++) out[(size_t)i * (size_t)columns + (size_t)x] = found[i];
        }
    }
    free(turned);
    return 0;
}

/* `rows` rows of `made`, of `width` pixels as those of `given`, the first one of which is row `top` of the picture. */
FOR_EACH_PROCESSOR
static void down(const uint32_t *given, int top, uint32_t *made, int width, int rows, const Side *side) {
    for (int y = 0; y < rows; y++) {
        const uint32_t *in = given + (size_t)(side->first[y] - top) * (size_t)width;
        const int32_t *weights = side->weights + (size_t)y * (size_t)side->taps;
        for (int next = 0; next < width; next += LANES) {
            int x = next + LANES > width ? width - LANES : next; /* the last ones again, not beyond the row */
            Pixels found;
            WEIGHTED(found, in + x, (size_t)width, weights, side->taps)
            memcpy(made + (size_t)y * (size_t)width + x, &found, sizeof found);
        }
    }
}

/* 0: done; otherwise as of `neighbours`. */
static int resized(const uint32_t *given, int width, int height, uint32_t *made, int columns, int rows,
                   const float box[4], int down_first) {
    Side x = {0}, y = {0};
    uint32_t *between = NULL;
    int status = columns < LANES || width < LANES ? 2 : neighbours(&x, width, box[0], box[2], columns);
    if (!status) status = neighbours(&y, height, box[1], box[3], rows);
    if (!status) {
        int top = y.first[0], number = y.first[rows - 1] + y.taps - top;
        between = malloc(sizeof(uint32_t) * (down_first ? (size_t)width * (size_t)rows : (size_t)columns * (size_t)number));
        if (!between) {
            status = 1;
        } else if (down_first) {
            down(given, 0, between, width, rows, &y);
            status = across(between, width, made, columns, rows, &x);
        } else {
            status = across(given + (size_t)top * (size_t)width, width, between, columns, number, &x);
            if (!status) down(between, top, made, columns, rows, &y);
        }
    }
    free(between);
    free(x.first), free(x.weights), free(y.first), free(y.weights);
    return status;
}

/* The pixels of a picture that Pillow exports, or NULL and an error. */
static uint32_t *pixels_of(PyObject *capsule, int width, int height) {
    struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (!array) return NULL;
    int64_t number = (int64_t)width * height;
    if (width < 1 || height < 1 || array->length != number || array->offset || array->n_children != 1 ||
        array->children[0]->length != number * 4 || array->children[0]->offset || array->children[0]->n_buffers != 2 ||
        !array->children[0]->buffers[1]) {
        PyErr_Format(PyExc_ValueError, "no picture of %d x %d pixels of 4 bytes", width, height);
        return NULL;
    }
    return (uint32_t *)array->children[0]->buffers[1];
}

static PyObject *bicubic(PyObject *Py_UNUSED(module), PyObject *arguments) {
    PyObject *source, *target;
    int width, height, columns, rows, down_first, status;
    float box[4];
    if (!PyArg_ParseTuple(arguments, "O(ii)O(ii)(ffff)p", &source, &width, &height, &target, &columns, &rows, &box[0],
                          &box[1], &box[2], &box[3], &down_first))
        return NULL;
    const uint32_t *given = pixels_of(source, width, height);
    uint32_t *made = given ? pixels_of(target, columns, rows) : NULL;
    if (!made) return NULL;
    if (!(0 <= box[0] && box[0] < box[2] && box[2] <= width && 0 <= box[1] && box[1] < box[3] && box[3] <= height)) {
        PyErr_SetString(PyExc_ValueError, "the box is not inside of the picture");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS status = resized(given, width, height, made, columns, rows, box, down_first);
    Py_END_ALLOW_THREADS
    if (status == 1) return PyErr_NoMemory();
    return PyBool_FromLong(status == 0);
}

static PyMethodDef methods[] = {
    {"bicubic", bicubic, METH_VARARGS,
     "bicubic(source, (width, height), target, (columns, rows), (left, top, right, bottom)) -> bool\n\n"
     "The part `box` of an RGB picture into another one, both as of `Image.__arrow_c_array__()[1]`. False, and the "
     "target as it was, where the picture is smaller than the neighbours that one pixel is made of."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_bicubic", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__bicubic(void) { return PyModuleDef_Init(&definition); }
