/* A Python function that calls `k`: it takes COUNT arguments, which TAKEN converts to the C variables GIVEN.
   Python's headers may not be installed, so the parts of Python's C API that it uses are declared here. */
typedef struct _object object;
extern object _Py_NoneStruct;
extern object *PyCFunction_NewEx(const void *method, object *self, object *module);
extern object *PyErr_Format(object *kind, const char *text, ...);
extern object *PyErr_Occurred(void);
extern object *PyExc_TypeError;
extern double PyFloat_AsDouble(object *);
extern long long PyLong_AsLongLong(object *);
extern void *PyLong_AsVoidPtr(object *);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern void Py_IncRef(object *);

static object *call(object *self, object *const *args, __PTRDIFF_TYPE__ count) {
  if (count != COUNT) return PyErr_Format(PyExc_TypeError, "k takes %d arguments, not %zd", COUNT, count);
  TAKEN
  if (PyErr_Occurred()) return 0;
  void *thread = PyEval_SaveThread(); /* other Python threads run meanwhile */
  k(GIVEN);
  PyEval_RestoreThread(thread);
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

object *python(void) {
  static const struct { const char *name; object *(*run)(object *, object *const *, __PTRDIFF_TYPE__); int flags; const char *doc; }
      method = {"k", call, 0x80 /* METH_FASTCALL */, 0};
  return PyCFunction_NewEx(&method, 0, 0);
}
