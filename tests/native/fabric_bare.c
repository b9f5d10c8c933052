/* A minimal user of libfabric, the baseline of the package's own loops.
 *
 *   fabric_bare write PROVIDER BYTES ITERATIONS WINDOW      MB/s of writes, WINDOW outstanding, like fi_rma_bw
 *   fabric_bare send PROVIDER BYTES ITERATIONS WINDOW       MB/s of messages, like fi_rdm_tagged_bw
 *   fabric_bare pingpong PROVIDER BYTES ITERATIONS 1        microseconds per round trip, like fi_rdm_pingpong
 *
 * Two processes on this host's loopback. Prints one number per repetition, given as the last argument.
 */
#define _GNU_SOURCE
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    long rc_ = (long)(call);                                                                                           \
    if (rc_) fprintf(stderr, "%s: %ld %s\n", #call, rc_, fi_strerror((int)-rc_)), exit(1);                             \
  } while (0)

enum { BUFFER = 16 << 20, RECEIVES = 128 };
static struct fid_ep* ep;
static struct fid_cq* cq;
static char *out, *in;
static void *out_desc, *in_desc;
static fi_addr_t peer;
static long sent, received;         /* completions so far */
static volatile unsigned* meetings; /* shared by the two processes */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void progress(void) {
  struct fi_cq_msg_entry entry[32];
  ssize_t n = fi_cq_read(cq, entry, 32);
  if (n == -FI_EAGAIN) return;
  if (n < 0) fprintf(stderr, "completion queue: %zd\n", n), exit(1);
  for (ssize_t i = 0; i < n; i++) {
    if (entry[i].flags & FI_RECV) received++;
    else sent++;
  }
}

/* Both sides wait for each other while they keep polling. */
static void meet(int first) {
  unsigned mine = ++meetings[first * 16];
  while (meetings[!first * 16] < mine) progress();
}

static struct fi_info* find(const char* provider) {
  struct fi_info *hints = fi_allocinfo(), *list, *info;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = 0;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->fabric_attr->prov_name = strdup(provider);
  OK(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list));
  for (info = list; info; info = info->next)
    if (strcmp(info->fabric_attr->prov_name, provider) == 0 &&
        (strcmp(info->domain_attr->name, "lo") == 0 || strcmp(provider, "shm") == 0)) {
      info->domain_attr->threading = FI_THREAD_DOMAIN;
      return info;
    }
  fprintf(stderr, "no %s on loopback\n", provider);
  exit(1);
}

static double run(const char* mode, int first, size_t bytes, long iterations, long window, uint64_t remote,
                  uint64_t key) {
  sent = received = 0;
  meet(first);
  double start = now();
  if (strcmp(mode, "write") == 0) {
    if (first)
      for (long posted = 0; sent < iterations;) {
        while (posted < iterations && posted - sent < window) {
          ssize_t rc = fi_write(ep, out, bytes, out_desc, peer, remote, key, NULL);
          if (rc == -FI_EAGAIN) break;
          OK(rc);
          posted++;
        }
        progress();
      }
  } else {
    size_t inject = 64;
    long posted = 0, reposted = 0;
    int pingpong = strcmp(mode, "pingpong") == 0;
    while (first || pingpong ? posted < iterations || sent < posted || (pingpong && received < iterations)
                             : received < iterations) {
      int my_turn = pingpong ? posted < iterations && (first ? received == posted : received > posted)
                             : first && posted < iterations && posted - sent < window;
      if (my_turn) {
        ssize_t rc = bytes <= inject ? fi_inject(ep, out, bytes, peer) : fi_send(ep, out, bytes, out_desc, peer, NULL);
        if (rc != -FI_EAGAIN) {
          OK(rc);
          posted++;
          if (bytes <= inject) sent++;
          if (!pingpong) continue;
        }
      }
      progress();
      for (; reposted < received; reposted++) OK(fi_recv(ep, in, bytes, in_desc, FI_ADDR_UNSPEC, NULL));
    }
  }
  double seconds = now() - start;
  meet(first);
  return strcmp(mode, "pingpong") == 0 ? seconds / iterations * 1e6 : bytes * iterations / seconds / 1e6;
}

int main(int argc, char** argv) {
  if (argc != 7) return fprintf(stderr, "usage: see the head of fabric_bare.c\n"), 2;
  const char* mode = argv[1];
  size_t bytes = strtoul(argv[3], NULL, 10);
  long iterations = atol(argv[4]), window = atol(argv[5]), repeat = atol(argv[6]);
  int sockets[2];
  OK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
  meetings = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int child = fork(), first = child != 0, socket = sockets[first];
  if (!first) prctl(PR_SET_PDEATHSIG, SIGKILL);
  cpu_set_t cpus; /* a processor each, so that every run meets the same caches */
  CPU_ZERO(&cpus);
  CPU_SET(first ? 0 : 1, &cpus);
  sched_setaffinity(0, sizeof cpus, &cpus);
  close(sockets[!first]); /* an end of file shows that the other process has ended */

  struct fi_info* info = find(argv[2]);
  struct fid_fabric* fabric;
  struct fid_domain* domain;
  struct fid_av* av;
  struct fid_mr *out_mr, *in_mr;
  struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
  struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_MSG, .size = 4096};
  OK(fi_fabric(info->fabric_attr, &fabric, NULL));
  OK(fi_domain(fabric, info, &domain, NULL));
  OK(fi_av_open(domain, &av_attr, &av, NULL));
  OK(fi_cq_open(domain, &cq_attr, &cq, NULL));
  OK(fi_endpoint(domain, info, &ep, NULL));
  OK(fi_ep_bind(ep, &av->fid, 0));
  OK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
  OK(fi_enable(ep));
  out = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  in = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
  OK(fi_mr_reg(domain, out, BUFFER, access, 0, 1, 0, &out_mr, NULL));
  OK(fi_mr_reg(domain, in, BUFFER, access, 0, 2, 0, &in_mr, NULL));
  out_desc = fi_mr_desc(out_mr);
  in_desc = fi_mr_desc(in_mr);

  struct {
    size_t length;
    uint64_t base, key;
    char name[256];
  } mine = {.length = sizeof mine.name, .key = fi_mr_key(in_mr)}, theirs;
  mine.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)in : 0;
  OK(fi_getname(&ep->fid, mine.name, &mine.length));
  if (write(socket, &mine, sizeof mine) != sizeof mine || recv(socket, &theirs, sizeof theirs, MSG_WAITALL) <= 0)
    return 1;
  if (fi_av_insert(av, theirs.name, 1, &peer, 0, NULL) != 1) return 1;

  for (long i = 0; i < RECEIVES; i++) OK(fi_recv(ep, in, bytes, in_desc, FI_ADDR_UNSPEC, NULL));
  for (long i = 0; i < repeat; i++) {
    double figure = run(mode, first, bytes, iterations, window, theirs.base, theirs.key);
    if (first) printf("%.4f\n", figure), fflush(stdout);
  }
  fi_close(&out_mr->fid);
  fi_close(&in_mr->fid);
  fi_close(&ep->fid);
  return first ? (waitpid(child, NULL, 0), 0) : 0;
}
