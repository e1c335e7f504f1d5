package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/pgserver"
)

const (
	walMessages = 2000
	walBulk     = 500 // messages of one Add
	walBatch    = 100 // messages of one delivery
)

// walServer writes nothing but what it is asked to: no page images after a
// checkpoint, which depend on when that was, and no vacuum.
var walServer = pgserver.Options{Durable: true, Settings: map[string]string{"full_page_writes": "off", "autovacuum": "off"}}

// pgWAL compares the log that a message's life writes.
func pgWAL(ctx context.Context, b *bench) (err error) {
	server, err := pgserver.Start(walServer)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(pgserver.Fast)) }()
	if err := countTuples(ctx, b, server.DSN("postgres")); err != nil {
		return err
	}
	w, err := newWALMeter(ctx, server.DSN("postgres"))
	if err != nil {
		return err
	}
	defer w.pool.Close()
	for _, how := range []struct {
		name string
		adds int // messages of one transaction
	}{{"pg-wal-bulk", walBulk}, {"pg-wal-single", 1}} {
		ratio, err := b.compare(how.name, "bytes/message",
			func() (float64, error) { return w.measure(ctx, how.adds, w.outbox) },
			func() (float64, error) { return w.measure(ctx, how.adds, w.byHand) })
		if err != nil {
			return err
		}
		b.atMost(how.name, ratio, 1.05)
	}
	return nil
}

// walMeter is both sides of the comparison over one table.
type walMeter struct {
	db   *gorm.DB
	pool *sql.DB
	in   *outbox.Instance
	dsn  string
}

func newWALMeter(ctx context.Context, dsn string) (*walMeter, error) {
	db, pool, err := open(dsn)
	if err != nil {
		return nil, err
	}
	in, err := install(ctx, db, outbox.Config{Notify: outbox.Off}, outbox.Outbox{Relay: discard{}, BatchSize: walBatch})
	return &walMeter{db: db, pool: pool, in: in, dsn: dsn}, err
}

// measure returns the bytes of log that a message's life writes.
func (w *walMeter) measure(ctx context.Context, adds int, live func(ctx context.Context, adds int) error) (float64, error) {
	if err := execute(ctx, w.dsn, "TRUNCATE outboxer_messages RESTART IDENTITY", "CHECKPOINT"); err != nil {
		return 0, err
	}
	var before string
	if err := w.pool.QueryRowContext(ctx, "SELECT pg_current_wal_insert_lsn()").Scan(&before); err != nil {
		return 0, err
	}
	if err := live(ctx, adds); err != nil {
		return 0, err
	}
	var bytes float64
	err := w.pool.QueryRowContext(ctx, "SELECT pg_current_wal_insert_lsn() - $1::pg_lsn", before).Scan(&bytes)
	if err != nil {
		return 0, err
	}
	return bytes / walMessages, requireEmpty(ctx, w.db)
}

func (w *walMeter) outbox(ctx context.Context, adds int) error {
	for from := 0; from < walMessages; from += adds {
		events := make([]outbox.Event, adds)
		for i := range events {
			events[i] = outbox.Message{Type: messageType, GroupKey: walGroup(from + i), Payload: payload()}
		}
		err := w.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, events...) })
		if err != nil {
			return err
		}
	}
	_, err := w.in.Drain(ctx)
	return err
}

// byHand writes the same rows and deletes them in the same numbers.
func (w *walMeter) byHand(ctx context.Context, adds int) error {
	conn, err := pgx.Connect(ctx, w.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	const insert = `
INSERT INTO outboxer_messages (outbox, partitions, partition, group_key, type, payload)
SELECT 'orders', 1, 0, g, 'order.placed', p FROM unnest($1::text[], $2::bytea[]) AS u(g, p) RETURNING id`
	var ids []int64
	for from := 0; from < walMessages; from += adds {
		groups, payloads := make([]string, adds), make([][]byte, adds)
		for i := range adds {
			groups[i], payloads[i] = walGroup(from+i), payload()
		}
		rows, err := conn.Query(ctx, insert, groups, payloads)
		if err != nil {
			return err
		}
		added, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return err
		}
		ids = append(ids, added...)
	}
	for batch := range slices.Chunk(ids, walBatch) {
		if _, err := conn.Exec(ctx, handDelete, batch); err != nil {
			return err
		}
	}
	return nil
}

func walGroup(i int) string { return "group-" + strconv.Itoa(i) }

// countTuples runs the outbox's side once on a fresh table, and reads what the
// statistics say of it. It ends the pool first, because a server process
// reports its last numbers when it ends.
func countTuples(ctx context.Context, b *bench, dsn string) error {
	w, err := newWALMeter(ctx, dsn)
	if err != nil {
		return err
	}
	if err := errors.Join(w.outbox(ctx, walBulk), w.pool.Close()); err != nil {
		return err
	}
	updated, deleted, err := readTuples(ctx, dsn)
	if err != nil {
		return err
	}
	dead := (updated + deleted) / walMessages
	b.add(series{"pg-wal n_tup_upd", "tuples", []float64{updated}},
		series{"pg-wal dead tuples", "tuples/message", []float64{dead}})
	b.atMost("pg-wal-n_tup_upd", updated, 0)
	b.atMost("pg-wal-dead-tuples", dead, 1)
	return nil
}

// readTuples reads the table's counters of updates and deletions, once all
// server processes have reported. An update leaves a dead tuple like a
// deletion; n_dead_tup itself falls again when a page is tidied up.
func readTuples(ctx context.Context, dsn string) (updated, deleted float64, err error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close(ctx)
	for range 100 {
		err = conn.QueryRow(ctx, "SELECT n_tup_upd, n_tup_del FROM pg_stat_user_tables WHERE relname = 'outboxer_messages'").
			Scan(&updated, &deleted)
		if err != nil || deleted >= walMessages {
			return updated, deleted, err
		}
		if _, err := conn.Exec(ctx, "SELECT pg_sleep(0.1)"); err != nil {
			return 0, 0, err
		}
	}
	return 0, 0, fmt.Errorf("the statistics count %.0f deleted messages of %d", deleted, walMessages)
}
