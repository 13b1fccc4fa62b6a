// What NVTX loads from NVTX_INJECTION64_PATH: writes every range of every domain to the file that NVTX_LOG names.
//
// The few declarations of NVTX 3 that it needs are copied from its headers, which not every machine has.

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CALLBACKS = 1, CORE2 = 5 };
enum { RANGE_PUSH_EX = 4, RANGE_POP = 5, NAME_CATEGORY_A = 8, REGISTER_STRING_A = 10, CREATE_A = 12 };
enum { PAYLOAD_INT64 = 2, MESSAGE_REGISTERED = 3 };

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
} Attributes;

typedef void (**Slot)(void);
typedef struct {
    size_t size;
    int (*module_functions)(int module, Slot **table, unsigned *size);
} Callbacks;

typedef struct {
    char *name;
    char *categories[64];
} Domain;

static int log_file = -1;

static void line(const char *kind, Domain *domain, const char *category, int64_t payload, const char *message) {
    char text[4096];
    int length = snprintf(text, sizeof text, "%s\t%s\t%s\t%lld\t%s\n", kind, domain ? domain->name : "", category,
                          (long long)payload, message);
    if (write(log_file, text, length) != length)
        abort();
}

static Domain *create(const char *name) {
    Domain *domain = calloc(1, sizeof *domain);
    domain->name = strdup(name);
    return domain;
}

static void name_category(Domain *domain, uint32_t category, const char *name) {
    domain->categories[category] = strdup(name);
}

static const char *register_string(Domain *domain, const char *text) {
    return strdup(text);
}

static int push(Domain *domain, const Attributes *range) {
    const char *category = range->category ? domain->categories[range->category] : "";
    int64_t payload = range->payload_type == PAYLOAD_INT64 ? range->payload : -1;
    line("push", domain, category, payload, range->message_type == MESSAGE_REGISTERED ? range->message : "?");
    return 0;
}

static int pop(Domain *domain) {
    line("pop", domain, "", 0, "");
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const Callbacks *callbacks = export_table(CALLBACKS);
    Slot *functions;
    unsigned size;
    log_file = open(getenv("NVTX_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (log_file < 0 || !callbacks->module_functions(CORE2, &functions, &size) || size <= CREATE_A)
        return 0;
    *functions[CREATE_A] = (void (*)(void))create;
    *functions[NAME_CATEGORY_A] = (void (*)(void))name_category;
    *functions[REGISTER_STRING_A] = (void (*)(void))register_string;
    *functions[RANGE_PUSH_EX] = (void (*)(void))push;
    *functions[RANGE_POP] = (void (*)(void))pop;
    return 1;
}
