package dialect

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/gormoutbox/outbox/engine"
)

// pgStrayLanes lists the lanes of other partition counts that hold messages,
// jumping from lane to lane through each index.
const pgStrayLanes = `
WITH RECURSIVE force AS MATERIALIZED (
	SELECT COALESCE((SELECT partitions FROM {meta} WHERE outbox = $1::text), 1)::smallint AS n
), ready AS (
	(SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'pending' AND m.scheduled_at IS NULL ORDER BY m.partitions, m.partition LIMIT 1)
	UNION ALL
	SELECT s.partitions, s.partition FROM ready r CROSS JOIN LATERAL (SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'pending' AND m.scheduled_at IS NULL
		AND (m.partitions, m.partition) > (r.partitions, r.partition) ORDER BY m.partitions, m.partition LIMIT 1) s
), due AS (
	(SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'pending' AND m.scheduled_at IS NOT NULL ORDER BY m.partitions, m.partition LIMIT 1)
	UNION ALL
	SELECT s.partitions, s.partition FROM due r CROSS JOIN LATERAL (SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'pending' AND m.scheduled_at IS NOT NULL
		AND (m.partitions, m.partition) > (r.partitions, r.partition) ORDER BY m.partitions, m.partition LIMIT 1) s
), dead AS (
	(SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'dead' ORDER BY m.partitions, m.partition LIMIT 1)
	UNION ALL
	SELECT s.partitions, s.partition FROM dead r CROSS JOIN LATERAL (SELECT m.partitions, m.partition FROM {messages} m WHERE m.outbox = $1::text AND m.status = 'dead'
		AND (m.partitions, m.partition) > (r.partitions, r.partition) ORDER BY m.partitions, m.partition LIMIT 1) s
)
SELECT partitions, partition, force.n FROM (SELECT * FROM ready UNION SELECT * FROM due UNION SELECT * FROM dead) lanes, force
WHERE partitions <> force.n ORDER BY partitions, partition`

const (
	pgTryLane = `SELECT pg_try_advisory_xact_lock(` + pgLaneKey + `)`

	// pgStrayRows holds the meta row, so that the count in force stays what it
	// is until the rows have moved.
	pgStrayRows = `
WITH force AS MATERIALIZED (SELECT partitions FROM {meta} WHERE outbox = $1::text FOR SHARE)
SELECT id, COALESCE(group_key, ''), COALESCE((SELECT partitions FROM force), 1) FROM (
	(SELECT id, group_key FROM {messages} WHERE outbox = $1::text AND partitions = $2::smallint AND partition = $3::smallint AND status = 'pending' AND scheduled_at IS NULL LIMIT $4::bigint)
	UNION ALL
	(SELECT id, group_key FROM {messages} WHERE outbox = $1::text AND partitions = $2::smallint AND partition = $3::smallint AND status = 'pending' AND scheduled_at IS NOT NULL LIMIT $4::bigint)
	UNION ALL
	(SELECT id, group_key FROM {messages} WHERE outbox = $1::text AND partitions = $2::smallint AND partition = $3::smallint AND status = 'dead' LIMIT $4::bigint)
) rows LIMIT $4::bigint`

	pgRemap = `
UPDATE {messages} m SET partitions = $1::smallint, partition = u.partition
FROM unnest($2::bigint[], $3::integer[]) AS u(id, partition)
WHERE m.id = u.id AND m.status IN ('pending', 'dead')`
)

// Remap implements engine.Storage. The lanes of other counts are emptied one
// by one, each under its own lock: a worker that still delivers from it, not
// knowing of the new count yet, is waited for.
func (p *Postgres) Remap(ctx context.Context, outbox string, limit int) (moved int, more bool, err error) {
	t, err := p.table(outbox)
	if err != nil {
		return 0, false, err
	}
	lanes, err := p.strayLanes(ctx, t, outbox)
	if err != nil {
		return 0, false, fmt.Errorf("remap: %w", err)
	}
	for _, lane := range lanes {
		if moved >= limit {
			return moved, true, nil
		}
		n, left, err := p.remapLane(ctx, t, lane, limit-moved)
		moved += n
		more = more || left
		if err != nil {
			return moved, true, fmt.Errorf("remap: %w", err)
		}
	}
	return moved, more, nil
}

func (p *Postgres) strayLanes(ctx context.Context, t *pgTable, outbox string) ([]engine.Lane, error) {
	rows, err := p.db.QueryContext(ctx, t.sql.strayLanes, outbox)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var lanes []engine.Lane
	for rows.Next() {
		lane := engine.Lane{Outbox: outbox}
		var inForce int
		if err := rows.Scan(&lane.Partitions, &lane.Partition, &inForce); err != nil {
			return nil, err
		}
		lanes = append(lanes, lane)
	}
	return lanes, rows.Err()
}

// remapLane moves up to limit messages out of one lane; left says that there
// may be more, or that its owner was at work.
func (p *Postgres) remapLane(ctx context.Context, t *pgTable, lane engine.Lane, limit int) (moved int, left bool, err error) {
	tx, err := p.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, true, err
	}
	defer tx.Rollback() // after a commit it does nothing
	var owned bool
	if err := tx.QueryRowContext(ctx, t.sql.tryLane, laneOutbox(lane.Outbox), lane.Partition).Scan(&owned); err != nil {
		return 0, true, err
	}
	if !owned {
		return 0, true, nil
	}
	ids, to, n, err := strayRows(ctx, tx, t, lane, limit)
	if err != nil || len(ids) == 0 {
		return 0, err != nil, err
	}
	if n == lane.Partitions {
		return 0, false, nil // it came into force again meanwhile
	}
	if _, err := tx.ExecContext(ctx, t.sql.remap, n, array(p.pgx, ids), array(p.pgx, to)); err != nil {
		return 0, true, err
	}
	if err := tx.Commit(); err != nil {
		return 0, true, err
	}
	return len(ids), len(ids) == limit, nil
}

// strayRows lists messages of a lane, each with its partition among the n in force.
func strayRows(ctx context.Context, tx *sql.Tx, t *pgTable, lane engine.Lane, limit int) (ids []int64, to []int32, n int, err error) {
	rows, err := tx.QueryContext(ctx, t.sql.strayRows, lane.Outbox, lane.Partitions, lane.Partition, limit)
	if err != nil {
		return nil, nil, 0, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		var group string
		if err := rows.Scan(&id, &group, &n); err != nil {
			return nil, nil, 0, err
		}
		hash := uint64(id)
		if group != "" {
			hash = engine.GroupHash(group)
		}
		ids = append(ids, id)
		to = append(to, int32(engine.Partition(hash, n)))
	}
	return ids, to, n, rows.Err()
}
