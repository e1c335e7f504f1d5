package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// probeText looks at all lanes of the given outboxes (?1, a JSON array) at the
// time ?2: three index descents for each lane, and those of stray messages for
// each outbox.
const probeText = `
WITH RECURSIVE
facts (outbox, partitions, paused) AS (
	SELECT value, COALESCE(partitions, 1), paused_at IS NOT NULL
	FROM json_each(?1) LEFT JOIN {meta} ON {meta}.outbox = value
),
lanes (outbox, partitions, paused, partition) AS (
	SELECT outbox, partitions, paused, 0 FROM facts
	UNION ALL
	SELECT outbox, partitions, paused, partition + 1 FROM lanes WHERE partition + 1 < partitions
)
SELECT outbox, partitions, paused, partition,
	EXISTS (SELECT 1 FROM {messages} m INDEXED BY {ready} WHERE m.outbox = lanes.outbox
		AND m.partitions = lanes.partitions AND m.partition = lanes.partition
		AND status = 'pending' AND scheduled_at IS NULL)
	OR EXISTS (SELECT 1 FROM {messages} m INDEXED BY {due} WHERE m.outbox = lanes.outbox
		AND m.partitions = lanes.partitions AND m.partition = lanes.partition
		AND status = 'pending' AND scheduled_at <= ?2),
	(SELECT scheduled_at FROM {messages} m INDEXED BY {due} WHERE m.outbox = lanes.outbox
		AND m.partitions = lanes.partitions AND m.partition = lanes.partition
		AND status = 'pending' AND scheduled_at > ?2 ORDER BY scheduled_at LIMIT 1),
	partition = 0 AND (
		EXISTS (SELECT 1 FROM {messages} m INDEXED BY {ready} WHERE m.outbox = lanes.outbox
			AND m.partitions < lanes.partitions AND status = 'pending' AND scheduled_at IS NULL)
		OR EXISTS (SELECT 1 FROM {messages} m INDEXED BY {ready} WHERE m.outbox = lanes.outbox
			AND m.partitions > lanes.partitions AND status = 'pending' AND scheduled_at IS NULL)
		OR EXISTS (SELECT 1 FROM {messages} m INDEXED BY {due} WHERE m.outbox = lanes.outbox
			AND m.partitions < lanes.partitions AND status = 'pending' AND scheduled_at IS NOT NULL)
		OR EXISTS (SELECT 1 FROM {messages} m INDEXED BY {due} WHERE m.outbox = lanes.outbox
			AND m.partitions > lanes.partitions AND status = 'pending' AND scheduled_at IS NOT NULL))
FROM lanes`

// Probe implements engine.Storage.
func (s *SQLite) Probe(ctx context.Context, outboxes []string) (map[string]engine.Probed, error) {
	byTable := make(map[*liteTable][]string)
	for _, name := range outboxes {
		o, err := s.outbox(name)
		if err != nil {
			return nil, err
		}
		byTable[o.liteTable] = append(byTable[o.liteTable], name)
	}
	all := make(map[string]engine.Probed, len(outboxes))
	for t, names := range byTable {
		err := retryBusy(ctx, func() error { return s.probeTable(ctx, t, names, all) })
		if err != nil {
			return nil, fmt.Errorf("probe %s: %w", t.table.Messages(), err)
		}
	}
	return all, nil
}

func (s *SQLite) probeTable(ctx context.Context, t *liteTable, outboxes []string, all map[string]engine.Probed) error {
	for _, name := range outboxes {
		all[name] = engine.Probed{NextDue: make(map[int]time.Duration)}
	}
	now := s.micros()
	found, err := s.db.QueryContext(ctx, t.probe, jsonArray(outboxes), now)
	if err != nil {
		return err
	}
	defer found.Close()
	for found.Next() {
		var outbox string
		var partition int
		var facts engine.Facts
		var ready, stray bool
		var nextDue sql.NullInt64
		err := found.Scan(&outbox, &facts.Partitions, &facts.Paused, &partition, &ready, &nextDue, &stray)
		if err != nil {
			return err
		}
		probed := all[outbox]
		probed.Facts = facts
		probed.Stray = probed.Stray || stray
		if ready {
			probed.Ready = append(probed.Ready, partition)
		}
		if nextDue.Valid {
			probed.NextDue[partition] = time.Duration(nextDue.Int64-now) * time.Microsecond
		}
		all[outbox] = probed
	}
	return found.Err()
}
