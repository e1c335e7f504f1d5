package dialect_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// The benchmarks compare with what one would write by hand on database/sql
// against the same tables. The aims are 0.8 of the speed for an add and 0.7
// for draining.

const benchBatch = 100

var benchLane = engine.Lane{Outbox: storagetest.Orders, Partitions: 1}

func benchRow() engine.Row {
	return engine.Row{
		Outbox: storagetest.Orders, Type: "order.placed", GroupKey: "customer-4711",
		Hash: engine.GroupHash("customer-4711"), Payload: []byte(strings.Repeat("x", 200)),
	}
}

func BenchmarkSQLiteAdd(b *testing.B) {
	row := benchRow()
	b.Run("hand", func(b *testing.B) {
		l := newLite(b)
		text := "INSERT INTO " + liteNames[row.Outbox].Messages() +
			" (inserted_at, outbox, partition, partitions, group_key, type, payload) VALUES (?, ?, ?, ?, ?, ?, ?)"
		benchAdd(b, l, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, text, int64(1_700_000_000_000_000), row.Outbox, 0, 1, row.GroupKey, row.Type, row.Payload)
			return err
		})
	})
	b.Run("outbox", func(b *testing.B) {
		l := newLite(b)
		benchAdd(b, l, func(ctx context.Context, tx *sql.Tx) error {
			_, err := l.storage.Insert(ctx, tx, []engine.Row{row}, false)
			return err
		})
	})
}

func benchAdd(b *testing.B, l *liteDB, add func(context.Context, *sql.Tx) error) {
	for b.Loop() {
		tx, err := l.db.BeginTx(b.Context(), nil)
		if err != nil {
			b.Fatal(err)
		}
		if err := add(b.Context(), tx); err != nil {
			b.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSQLiteDrain(b *testing.B) {
	b.Run("hand", func(b *testing.B) {
		benchDrain(b, func(b *testing.B, l *liteDB) int { return handBatch(b, l.db) })
	})
	b.Run("outbox", func(b *testing.B) {
		benchDrain(b, func(b *testing.B, l *liteDB) (n int) {
			err := l.storage.WithPartition(b.Context(), benchLane, func(ctx context.Context, c engine.Claim) error {
				page, err := c.Fetch(ctx, engine.Query{Limit: benchBatch, MaxBytes: 8 << 20})
				n = len(page.Envelopes)
				var s engine.Settlement
				for i := range page.Envelopes {
					s.Delivered = append(s.Delivered, page.Envelopes[i].ID)
				}
				c.Settle(s)
				return err
			})
			if err != nil {
				b.Fatal(err)
			}
			return n
		})
	})
}

func benchDrain(b *testing.B, batch func(*testing.B, *liteDB) int) {
	const backlog = 20_000
	l := newLite(b)
	rows := make([]engine.Row, 1000)
	for i := range rows {
		rows[i] = benchRow()
	}
	drained := 0
	for b.Loop() {
		b.StopTimer()
		for range backlog / len(rows) {
			if err := l.add(b.Context(), rows...); err != nil {
				b.Fatal(err)
			}
		}
		b.StartTimer()
		for n := batch(b, l); n > 0; n = batch(b, l) {
			drained += n
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(drained), "ns/message")
}

func handBatch(b *testing.B, db *sql.DB) int {
	table := liteNames[storagetest.Orders].Messages()
	found, err := db.QueryContext(b.Context(), "SELECT id, group_key, type, headers, payload, attempts, inserted_at FROM "+table+
		" WHERE status = 'pending' AND scheduled_at IS NULL AND outbox = ? AND partitions = 1 AND partition = 0 ORDER BY id LIMIT ?",
		storagetest.Orders, benchBatch)
	if err != nil {
		b.Fatal(err)
	}
	defer found.Close()
	var ids []any
	for found.Next() {
		var id, attempts, inserted int64
		var group, typ, headers string
		var payload []byte
		if err := found.Scan(&id, &group, &typ, &headers, &payload, &attempts, &inserted); err != nil {
			b.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := found.Err(); err != nil {
		b.Fatal(err)
	}
	if len(ids) == 0 {
		return 0
	}
	_, err = db.ExecContext(b.Context(), fmt.Sprintf("DELETE FROM %s WHERE id IN (?%s)", table, strings.Repeat(", ?", len(ids)-1)), ids...)
	if err != nil {
		b.Fatal(err)
	}
	return len(ids)
}
