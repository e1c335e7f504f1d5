package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox"
)

// What one would write by hand for a relay that owns its partition, keeps the
// order of groups and lets the server end a transaction that it abandons.
const (
	handOwn   = `SELECT pg_try_advisory_xact_lock(1, 0)`
	handFetch = `
SELECT id, COALESCE(group_key, ''), type, payload, headers::text, attempts, inserted_at
FROM outboxer_messages
WHERE outbox = 'orders' AND partitions = 1 AND partition = 0 AND status = 'pending' AND scheduled_at IS NULL
	AND (group_key IS NULL OR group_key NOT IN (
		SELECT group_key FROM outboxer_messages
		WHERE outbox = 'orders' AND partitions = 1 AND partition = 0 AND status = 'pending' AND attempts > 0
			AND group_key IS NOT NULL))
ORDER BY id LIMIT 1000`
	handTimeout = `SET LOCAL idle_in_transaction_session_timeout = 15000`
	handDelete  = `DELETE FROM outboxer_messages WHERE id = ANY ($1)`
)

// byHand drains the table without the outbox.
func (d *pgDrainer) byHand(ctx context.Context) (float64, error) {
	if err := d.fill(ctx); err != nil {
		return 0, err
	}
	begun := time.Now()
	total := 0
	for {
		n, err := d.handBatch(ctx)
		if err != nil {
			return 0, err
		}
		if total += n; n == 0 {
			break
		}
	}
	took := time.Since(begun)
	return perSecond(total, took), d.requireEmpty(ctx)
}

func (d *pgDrainer) handBatch(ctx context.Context) (int, error) {
	tx, err := d.conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var owner bool
	if err := tx.QueryRow(ctx, handOwn).Scan(&owner); err != nil {
		return 0, err
	}
	if !owner {
		return 0, fmt.Errorf("the partition has another owner")
	}
	batch, err := handRead(ctx, tx)
	if err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, handTimeout); err != nil {
		return 0, err
	}
	ids := make([]int64, len(batch)) // a relay would deliver the batch here
	for i := range batch {
		ids[i] = batch[i].ID
	}
	if _, err := tx.Exec(ctx, handDelete, ids); err != nil {
		return 0, err
	}
	return len(batch), tx.Commit(ctx)
}

func handRead(ctx context.Context, tx pgx.Tx) ([]outbox.Envelope, error) {
	rows, err := tx.Query(ctx, handFetch)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	batch := make([]outbox.Envelope, 0, drainBatch)
	for rows.Next() {
		e := outbox.Envelope{Outbox: orders}
		var headers string
		if err := rows.Scan(&e.ID, &e.GroupKey, &e.Type, &e.Payload, &headers, &e.Attempts, &e.InsertedAt); err != nil {
			return nil, err
		}
		if headers != "{}" {
			if err := json.Unmarshal([]byte(headers), &e.Headers); err != nil {
				return nil, err
			}
		}
		e.ScheduledAt = e.InsertedAt
		batch = append(batch, e)
	}
	return batch, rows.Err()
}
