package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/gormoutbox/outbox"
)

const liteRows = 50_000

const liteBacklog = `
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?1)
INSERT INTO outboxer_messages (inserted_at, outbox, partitions, partition, group_key, type, payload)
SELECT ?2, 'orders', 1, 0, 'group-' || i, 'order.placed', randomblob(256) FROM n`

// sqliteDrain compares the draining of a backlog, with the default batch and
// with the one of pg-drain.
func sqliteDrain(ctx context.Context, b *bench) error {
	for _, batch := range []int{100, drainBatch} {
		if err := sqliteDrainBy(ctx, b, batch); err != nil {
			return err
		}
	}
	return nil
}

func sqliteDrainBy(ctx context.Context, b *bench, batch int) (err error) {
	var relay counter
	l, err := newLite(ctx, outbox.Outbox{Relay: &relay, BatchSize: batch})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	name := "sqlite-drain-" + strconv.Itoa(batch)
	ratio, err := b.compare(name, "messages/s", func() (float64, error) {
		if err := l.fill(ctx); err != nil {
			return 0, err
		}
		rate, err := drain(ctx, l.in, &relay, liteRows)
		if err != nil {
			return 0, err
		}
		return rate, requireEmpty(ctx, l.without)
	}, func() (float64, error) { return l.drainByHand(ctx, batch) })
	if err != nil {
		return err
	}
	b.atLeast(name, ratio, 0.7)
	return nil
}

func (l *liteDB) fill(ctx context.Context) error {
	if err := l.reset(ctx); err != nil {
		return err
	}
	if _, err := l.hand.ExecContext(ctx, liteBacklog, liteRows, time.Now().UnixMicro()); err != nil {
		return err
	}
	_, err := l.hand.ExecContext(ctx, "PRAGMA wal_checkpoint(TRUNCATE)")
	return err
}

func (l *liteDB) drainByHand(ctx context.Context, batch int) (float64, error) {
	if err := l.fill(ctx); err != nil {
		return 0, err
	}
	begun := time.Now()
	total := 0
	for n := -1; n != 0; total += n {
		var err error
		if n, err = handLiteBatch(ctx, l.hand, batch); err != nil {
			return 0, err
		}
	}
	took := time.Since(begun)
	return perSecond(total, took), requireEmpty(ctx, l.without)
}

func handLiteBatch(ctx context.Context, db *sql.DB, limit int) (int, error) {
	batch, err := handLiteRead(ctx, db, limit)
	if err != nil || len(batch) == 0 {
		return 0, err
	}
	ids := make([]string, len(batch))
	for i := range batch { // a relay would deliver the batch here
		ids[i] = strconv.FormatInt(batch[i].ID, 10)
	}
	_, err = db.ExecContext(ctx, fmt.Sprintf("DELETE FROM outboxer_messages WHERE id IN (%s)", strings.Join(ids, ",")))
	return len(batch), err
}

func handLiteRead(ctx context.Context, db *sql.DB, limit int) ([]outbox.Envelope, error) {
	const fetch = `
SELECT id, COALESCE(group_key, ''), type, payload, headers, attempts, inserted_at FROM outboxer_messages
WHERE outbox = 'orders' AND partitions = 1 AND partition = 0 AND status = 'pending' AND scheduled_at IS NULL
	AND (group_key IS NULL OR group_key NOT IN (
		SELECT group_key FROM outboxer_messages
		WHERE outbox = 'orders' AND partitions = 1 AND partition = 0 AND status = 'pending' AND attempts > 0
			AND group_key IS NOT NULL))
ORDER BY id LIMIT ?`
	rows, err := db.QueryContext(ctx, fetch, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	batch := make([]outbox.Envelope, 0, limit)
	for rows.Next() {
		e := outbox.Envelope{Outbox: orders}
		var headers string
		var inserted int64
		if err := rows.Scan(&e.ID, &e.GroupKey, &e.Type, &e.Payload, &headers, &e.Attempts, &inserted); err != nil {
			return nil, err
		}
		if headers != "{}" {
			if err := json.Unmarshal([]byte(headers), &e.Headers); err != nil {
				return nil, err
			}
		}
		e.InsertedAt = time.UnixMicro(inserted)
		e.ScheduledAt = e.InsertedAt
		batch = append(batch, e)
	}
	return batch, rows.Err()
}
