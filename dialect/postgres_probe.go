package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// pgProbe looks at each lane through one descent of an index for what is ready
// and one for what is due; the row of an outbox without either has no lane.
//
// The series of lanes goes through an array, of which the planner expects ten
// elements instead of a thousand: by its estimate the statement would otherwise
// be worth compiling, which takes two hundred times as long as running it.
const pgProbe = `
SELECT o.outbox, f.partitions, f.paused, f.stray, l.partition, l.ready, l.due
FROM unnest($1::text[]) AS o(outbox)
CROSS JOIN LATERAL (SELECT
	COALESCE((SELECT m.partitions FROM {meta} m WHERE m.outbox = o.outbox), 1) AS partitions,
	EXISTS (SELECT FROM {meta} m WHERE m.outbox = o.outbox AND m.paused_at IS NOT NULL) AS paused) n
CROSS JOIN LATERAL (SELECT n.partitions, n.paused,
	(SELECT true FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions < n.partitions AND m.status = 'pending' AND m.scheduled_at IS NULL ORDER BY m.partitions, m.partition, m.id LIMIT 1) IS NOT NULL
	OR (SELECT true FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions > n.partitions AND m.status = 'pending' AND m.scheduled_at IS NULL ORDER BY m.partitions, m.partition, m.id LIMIT 1) IS NOT NULL
	OR (SELECT true FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions < n.partitions AND m.status = 'pending' AND m.scheduled_at IS NOT NULL ORDER BY m.partitions, m.partition, m.scheduled_at LIMIT 1) IS NOT NULL
	OR (SELECT true FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions > n.partitions AND m.status = 'pending' AND m.scheduled_at IS NOT NULL ORDER BY m.partitions, m.partition, m.scheduled_at LIMIT 1) IS NOT NULL
	AS stray) f
LEFT JOIN LATERAL (SELECT p.partition,
	(SELECT true FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions = f.partitions AND m.partition >= p.partition AND m.partition <= p.partition
		AND m.status = 'pending' AND m.scheduled_at IS NULL ORDER BY m.partition, m.id LIMIT 1) AS ready,
	(EXTRACT(epoch FROM (SELECT m.scheduled_at FROM {messages} m WHERE m.outbox = o.outbox AND m.partitions = f.partitions AND m.partition >= p.partition AND m.partition <= p.partition
		AND m.status = 'pending' AND m.scheduled_at IS NOT NULL ORDER BY m.partition, m.scheduled_at LIMIT 1) - statement_timestamp()) * 1000000)::bigint AS due
	FROM unnest(ARRAY(SELECT generate_series(0, f.partitions - 1))) AS p(partition)
) l ON l.ready OR l.due IS NOT NULL`

// Probe implements engine.Storage: one statement a table.
func (p *Postgres) Probe(ctx context.Context, outboxes []string) (map[string]engine.Probed, error) {
	byTable := make(map[*pgTable][]string, 1)
	for _, o := range outboxes {
		t, err := p.table(o)
		if err != nil {
			return nil, err
		}
		byTable[t] = append(byTable[t], o)
	}
	found := make(map[string]engine.Probed, len(outboxes))
	for t, names := range byTable {
		if err := p.probe(ctx, t, names, found); err != nil {
			return nil, fmt.Errorf("probe %s: %w", t.name.Messages(), err)
		}
	}
	return found, nil
}

func (p *Postgres) probe(ctx context.Context, t *pgTable, outboxes []string, found map[string]engine.Probed) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	rows, err := p.db.QueryContext(ctx, t.sql.probe, array(p.pgx, outboxes))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			outbox    string
			now       engine.Probed
			partition sql.NullInt64
			ready     sql.NullBool
			due       sql.NullInt64
		)
		if err := rows.Scan(&outbox, &now.Partitions, &now.Paused, &now.Stray, &partition, &ready, &due); err != nil {
			return err
		}
		if before, ok := found[outbox]; ok {
			now = before
		}
		lane := int(partition.Int64)
		switch {
		case ready.Bool || due.Valid && due.Int64 <= 0:
			now.Ready = append(now.Ready, lane)
		case due.Valid:
			if now.NextDue == nil {
				now.NextDue = make(map[int]time.Duration)
			}
			now.NextDue[lane] = time.Duration(due.Int64) * time.Microsecond
		}
		found[outbox] = now
	}
	return rows.Err()
}

const (
	pgPruneDelivered = `
DELETE FROM {messages} WHERE id IN (
	SELECT id FROM {messages} WHERE outbox = $1::text AND status = 'delivered' AND delivered_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
	ORDER BY outbox, delivered_at LIMIT $3::bigint FOR UPDATE SKIP LOCKED)`
	pgPruneDead = `
DELETE FROM {messages} WHERE id IN (
	SELECT id FROM {messages} WHERE outbox = $1::text AND status = 'dead' AND dead_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
	ORDER BY outbox, dead_at LIMIT $3::bigint FOR UPDATE SKIP LOCKED)`
)

// Prune implements engine.Storage. Rows that another pruner has in hand are
// passed over, which takes READ COMMITTED: it is asked for, not assumed.
func (p *Postgres) Prune(ctx context.Context, q engine.PruneQuery) (int, error) {
	t, err := p.table(q.Outbox)
	if err != nil {
		return 0, err
	}
	tx, err := p.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, fmt.Errorf("prune: %w", err)
	}
	defer tx.Rollback() // after a commit it does nothing
	n, err := t.prune(ctx, tx, q)
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		return 0, fmt.Errorf("prune: %w", err)
	}
	return n, nil
}

func (t *pgTable) prune(ctx context.Context, tx *sql.Tx, q engine.PruneQuery) (int, error) {
	total := 0
	for _, kind := range []struct {
		sql string
		age time.Duration
	}{{t.sql.pruneDelivered, q.Delivered}, {t.sql.pruneDead, q.Dead}} {
		if kind.age < 0 || total >= q.Limit {
			continue
		}
		done, err := tx.ExecContext(ctx, kind.sql, q.Outbox, kind.age.Microseconds(), q.Limit-total)
		if err != nil {
			return 0, err
		}
		n, err := done.RowsAffected()
		if err != nil {
			return 0, err
		}
		total += int(n)
	}
	return total, nil
}
