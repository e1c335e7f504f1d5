// Bench measures what the outbox costs beside code that one would write by
// hand for the same tables, on the same machine, in one run:
//
//	make bench-core                       # all of it, under ten minutes
//	make bench-core ARGS="-only pg-drain" # one figure
//
// It ends with a line for each goal, "goal <what> <measured> <needed> ok" or
// "short". It is a report and no test: it exits with 0 if it could measure.
//
// # Method
//
// Each figure is the median of five runs. Where two sides are compared they
// take turns within a run, each going first in every other one, and a goal is
// about the median of the runs' ratios: a machine that is busy with something
// else slows both. The spread is the difference of the greatest and the least
// run, divided by the median.
//
// PostgreSQL is a private server on a temporary directory ($TMPDIR, which
// should not be in memory) with fsync, full_page_writes and synchronous_commit
// on; the settings that matter are printed. SQLite is a file in WAL mode with
// synchronous=NORMAL. Payloads have 256 bytes, messages a group of their own
// and no headers, and relays do nothing. Each figure has a database of its own.
//
//   - pg-drain, sqlite-drain: from Start of an instance with a backlog in one
//     partition to the end of its Stop, the table being empty; against a loop
//     over one connection that fetches a batch into the same struct and deletes
//     it by its ids. On PostgreSQL the loop owns the partition like the engine,
//     by an advisory lock, and takes one round trip for each statement.
//   - pg-wal: the difference of pg_current_wal_insert_lsn over the life of
//     messages, on a server of its own with full_page_writes and autovacuum off
//     and after a checkpoint, so that only the messages write; against INSERT
//     and DELETE in the same numbers of transactions.
//   - pg-add: transactions of eight writers through GORM, each with one row of
//     the business and one message; against an INSERT of the same message
//     through the same GORM. Notifications go out after the commit, and a
//     connection listens to them; nobody relays, for the relay's work is no part
//     of an add. sqlite-add: transactions of one writer with nothing but the
//     message.
//   - latency: from the return of the commit to the call of the relay, by the
//     machine's clock, about ten messages a second and two hundred. The relay is
//     in this process or in another one.
//   - idle: what pg_stat_statements counts for three nodes of 32 partitions on
//     an empty table. Self-tests of the listeners and pruning are apart.
package main
