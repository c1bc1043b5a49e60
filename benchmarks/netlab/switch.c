/* A switch between network namespaces: every packet leaves its node at the node's rate, travels, and enters the other
 * node at that node's rate.
 *
 *   switch COUNTERS LATENCY_US LIFE_SECONDS NAMESPACE MBIT [NAMESPACE MBIT]...
 *
 * Opens one TUN device "net0" inside every namespace (node n has the address 10.78.0.n+1), prints "ready", and forwards
 * until it is killed, its parent ends, or LIFE_SECONDS have passed. COUNTERS is a file of 16 x 16 x 3 unsigned 64-bit
 * numbers that it keeps up to date: for [source][target] the bytes of IP packets, the bytes of TCP payload, and packets
 * that it dropped because the queue of the target was full.
 *
 * Acknowledgements without data pass the data that waits at their node. On a real host they need not: Linux lets a
 * connection queue a few packets only. A TUN device defeats that limit, so all that a window allows waits here, and
 * acknowledgements behind it would halve the rate of connections that send both ways.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define NODES 16
#define QUEUE 8192      /* packets on their way to one node: 72 MB of jumbo frames */
#define BURST 32        /* packets read from one node before the others get their turn */
#define EARLY 2e-6      /* a packet may arrive this much early: shorter sleeps cost more than they gain */
#define RETRY 1e-4      /* a device took nothing: so much later again */
#define HEARTBEAT 0.5   /* seconds between two looks at the end of life */

typedef struct { double arrival; int length; unsigned char *bytes; } Packet;
typedef struct { uint64_t packet_bytes, payload_bytes, dropped; } Counter;
typedef struct { Packet packets[QUEUE]; unsigned head, tail; } Queue;
typedef struct {
    int device;
    double seconds_per_byte, egress_free, ingress_free;
    Queue data, acknowledgements;
} Node;

static Node nodes[NODES];
static Counter (*counters)[NODES];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int open_device(const char *namespace) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int handle = open(path, O_RDONLY | O_CLOEXEC);
    if (handle < 0 || setns(handle, CLONE_NEWNET) < 0) fail(path);
    close(handle);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {0};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    strcpy(request.ifr_name, "net0");
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) fail("/dev/net/tun");
    return device;
}

/* Bytes behind the IP and TCP headers; of other protocols, none. */
static int payload(const unsigned char *b, int length) {
    int header = (b[0] & 15) * 4;
    if (b[9] != 6 || length < header + 20) return 0;
    return length - header - (b[header + 12] >> 4) * 4;
}

static int only_acknowledges(const unsigned char *b, int length) {
    int header = (b[0] & 15) * 4;
    return b[9] == 6 && length >= header + 20 && b[header + 13] == 0x10 && payload(b, length) == 0;
}

static void put(Queue *queue, double arrival, const unsigned char *b, int length) {
    Packet *packet = &queue->packets[queue->tail++ % QUEUE];
    packet->arrival = arrival;
    packet->length = length;
    packet->bytes = malloc(length);
    if (!packet->bytes) fail("malloc");
    memcpy(packet->bytes, b, length);
}

static void accept_packet(int source, int count, const unsigned char *b, int length, double latency) {
    if (length < 20 || b[0] >> 4 != 4 || b[16] != 10 || b[17] != 78) return;
    int target = b[19] - 1;
    if (target < 0 || target >= count) return;
    Node *from = &nodes[source], *to = &nodes[target];
    Counter *counter = &counters[source][target];
    int passes = only_acknowledges(b, length);
    Queue *queue = passes ? &to->acknowledgements : &to->data;
    if (queue->tail - queue->head >= QUEUE) { counter->dropped++; return; }
    double t = now(), start = t > from->egress_free ? t : from->egress_free;
    from->egress_free = start + length * from->seconds_per_byte;
    double entry = start > to->ingress_free ? start : to->ingress_free;
    double end = entry + length * to->seconds_per_byte;   /* cut-through: both links carry the packet at once */
    if (end < from->egress_free) end = from->egress_free;
    to->ingress_free = end;
    put(queue, (passes ? t : end) + latency, b, length);
    counter->packet_bytes += length;
    counter->payload_bytes += payload(b, length);
}

/* Hand over all packets that have arrived; returns when the next one does. */
static double deliver(int device, Queue *queue, double t, double next) {
    while (queue->head != queue->tail) {
        Packet *packet = &queue->packets[queue->head % QUEUE];
        if (packet->arrival > t + EARLY) return packet->arrival < next ? packet->arrival : next;
        if (write(device, packet->bytes, packet->length) < 0 && errno == EAGAIN) return t + RETRY;
        free(packet->bytes);
        queue->head++;
    }
    return next;
}

int main(int argc, char **argv) {
    int count = (argc - 4) / 2;
    if (argc < 6 || argc % 2 || count > NODES) {
        fprintf(stderr, "usage: switch COUNTERS LATENCY_US LIFE_SECONDS NAMESPACE MBIT [NAMESPACE MBIT]...\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int file = open(argv[1], O_RDWR);
    counters = mmap(0, sizeof(Counter) * NODES * NODES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || counters == MAP_FAILED) fail(argv[1]);
    double latency = atof(argv[2]) * 1e-6, end = now() + atof(argv[3]);
    struct pollfd ready[NODES];
    for (int n = 0; n < count; n++) {
        nodes[n].device = open_device(argv[4 + 2 * n]);
        nodes[n].seconds_per_byte = 8e-6 / atof(argv[5 + 2 * n]);
        ready[n] = (struct pollfd){.fd = nodes[n].device, .events = POLLIN};
    }
    printf("ready\n");
    fflush(stdout);
    for (double t = now(); t < end; t = now()) {
        double next = t + HEARTBEAT;
        for (int n = 0; n < count; n++) {
            next = deliver(nodes[n].device, &nodes[n].acknowledgements, t, next);
            next = deliver(nodes[n].device, &nodes[n].data, t, next);
        }
        double wait = next - now();
        if (wait < 0) wait = 0;
        struct timespec timeout = {(time_t)wait, (long)((wait - (time_t)wait) * 1e9)};
        ppoll(ready, count, &timeout, 0);
        for (int n = 0; n < count; n++)
            for (int k = 0; (ready[n].revents & POLLIN) && k < BURST; k++) {
                unsigned char bytes[65536];
                int length = read(nodes[n].device, bytes, sizeof bytes);
                if (length <= 0) break;
                accept_packet(n, count, bytes, length, latency);
            }
    }
    return 0;
}
