package main

import (
	"context"
	"maps"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// plans gathers the plans of fetches. They come from auto_explain, as notices
// to the client, and so are those of the very statements that are measured.
type plans struct {
	mu      sync.Mutex
	fetches []string
}

func (p *plans) adjust(c *pgx.ConnConfig) {
	maps.Copy(c.RuntimeParams, map[string]string{
		"session_preload_libraries":          "auto_explain",
		"auto_explain.log_min_duration":      "0",
		"auto_explain.log_analyze":           "on",
		"auto_explain.log_buffers":           "on",
		"auto_explain.log_timing":            "on",
		"auto_explain.log_settings":          "on",
		"auto_explain.log_nested_statements": "off",
		"client_min_messages":                "log",
	})
	c.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if strings.Contains(n.Message, "payload") && strings.Contains(n.Message, "Limit") {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.fetches = append(p.fetches, n.Message)
		}
	}
}

// explainDrain drains once more on either side and notes the plans of the
// first fetch and of one in the middle.
func explainDrain(ctx context.Context, b *bench, dsn string) error {
	var found plans
	d, err := newPGDrain(ctx, dsn, b.rows, found.adjust)
	if err != nil {
		return err
	}
	defer d.close()
	for _, s := range []struct {
		name    string
		measure func(context.Context) (float64, error)
	}{{"outbox", d.outbox}, {"by hand", d.byHand}} {
		found.fetches = nil
		if _, err := s.measure(ctx); err != nil {
			return err
		}
		for _, i := range []int{0, len(found.fetches) / 2} {
			if i < len(found.fetches) {
				b.note("fetch %d of %d, %s: %s\n", i+1, len(found.fetches), s.name, found.fetches[i])
			}
		}
	}
	return nil
}
