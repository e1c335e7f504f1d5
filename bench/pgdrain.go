package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/pprof"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox"
)

const drainBatch = 1000

// pgBacklog fills the table with pending messages of one partition, $1 in
// number, and leaves nothing behind for the database to do meanwhile.
const pgBacklog = `
INSERT INTO outboxer_messages (outbox, partitions, partition, group_key, type, payload)
SELECT 'orders', 1, 0, 'group-' || i, 'order.placed', decode(repeat(md5(i::text), 16), 'hex')
FROM generate_series(1, $1::int) i`

// pgDrain compares the draining of a backlog.
func pgDrain(ctx context.Context, b *bench) error {
	dsn, err := b.postgres(ctx, "drain")
	if err != nil {
		return err
	}
	d, err := newPGDrain(ctx, dsn, b.rows)
	if err != nil {
		return err
	}
	defer d.close()
	run := 0
	ratio, err := b.compare("pg-drain", "messages/s", func() (float64, error) {
		if run++; run == b.runs {
			d.profile = b.profile
		}
		return d.outbox(ctx)
	}, func() (float64, error) { return d.byHand(ctx) })
	if err != nil {
		return err
	}
	b.atLeast("pg-drain", ratio, 0.7)
	if b.explain {
		return explainDrain(ctx, b, dsn)
	}
	return nil
}

// profiled measures the same with a CPU profile.
func profiled(path string, measure side) side {
	return func() (v float64, err error) {
		file, err := os.Create(path)
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		if err := pprof.StartCPUProfile(file); err != nil {
			return 0, err
		}
		defer pprof.StopCPUProfile()
		return measure()
	}
}

// pgDrainer is both sides of the comparison over one table.
type pgDrainer struct {
	rows    int
	profile string // file for a CPU profile of the outbox's side; empty: none
	in      *outbox.Instance
	relay   counter
	conn    *pgx.Conn // fills the table and drains it by hand
	close   func()
}

func newPGDrain(ctx context.Context, dsn string, rows int, adjust ...func(*pgx.ConnConfig)) (*pgDrainer, error) {
	db, pool, err := open(dsn, adjust...)
	if err != nil {
		return nil, err
	}
	d := &pgDrainer{rows: rows, close: func() { _ = pool.Close() }}
	d.in, err = install(ctx, db, outbox.Config{}, outbox.Outbox{Relay: &d.relay, BatchSize: drainBatch})
	if err == nil {
		d.conn, err = connect(ctx, dsn, adjust...)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	d.close = func() {
		_ = pool.Close()
		_ = d.conn.Close(context.WithoutCancel(ctx))
	}
	return d, nil
}

func connect(ctx context.Context, dsn string, adjust ...func(*pgx.ConnConfig)) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	for _, fn := range adjust {
		fn(config)
	}
	return pgx.ConnectConfig(ctx, config)
}

// fill makes the backlog. Both sides find the same fresh table.
func (d *pgDrainer) fill(ctx context.Context) error {
	if _, err := d.conn.Exec(ctx, "TRUNCATE outboxer_messages RESTART IDENTITY"); err != nil {
		return err
	}
	if _, err := d.conn.Exec(ctx, pgBacklog, d.rows); err != nil {
		return err
	}
	for _, s := range []string{"VACUUM ANALYZE outboxer_messages", "CHECKPOINT"} {
		if _, err := d.conn.Exec(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (d *pgDrainer) outbox(ctx context.Context) (float64, error) {
	if err := d.fill(ctx); err != nil {
		return 0, err
	}
	measure := func() (float64, error) { return drain(ctx, d.in, &d.relay, d.rows) }
	if d.profile != "" {
		measure = profiled(d.profile, measure)
	}
	rate, err := measure()
	if err != nil {
		return 0, err
	}
	return rate, d.requireEmpty(ctx)
}

func (d *pgDrainer) requireEmpty(ctx context.Context) error {
	var left int
	if err := d.conn.QueryRow(ctx, "SELECT count(*) FROM outboxer_messages").Scan(&left); err != nil {
		return err
	}
	if left > 0 {
		return fmt.Errorf("%d messages are left", left)
	}
	return nil
}
