package main

import (
	"context"
	"net/http"
	"testing"

	"github.com/gin-gonic/gin"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/internal/testdb"
)

// breakage is a way to have every transaction that stores an order fail when it
// commits, and no sooner: by something that is checked, or done, then.
type breakage struct {
	dialect string
	breaks  []string
	heals   string
}

var breakages = map[string]breakage{
	"sqlite refuses": {"sqlite", []string{
		"CREATE TABLE permits (id integer PRIMARY KEY)",
		"CREATE TABLE checks (permit integer REFERENCES permits (id) DEFERRABLE INITIALLY DEFERRED)",
		"CREATE TRIGGER refuse AFTER INSERT ON orders BEGIN INSERT INTO checks VALUES (1); END",
	}, "DROP TRIGGER refuse"},
	"postgres refuses": {"postgres", []string{
		"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$",
		"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()",
	}, "DROP TRIGGER refuse ON orders"},
	"postgres drops the connection": {"postgres", []string{
		"CREATE FUNCTION drop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM 1; RETURN NULL; END $$",
		"CREATE CONSTRAINT TRIGGER drop AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION drop()",
	}, "DROP TRIGGER drop ON orders"},
}

func execute(t *testing.T, db *gorm.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if err := db.Exec(s).Error; err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// shrinkPool leaves so few connections that each one that is lost is missed.
func shrinkPool(t *testing.T, db *gorm.DB) {
	t.Helper()
	pool, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	pool.SetMaxOpenConns(fewConns)
	pool.SetMaxIdleConns(fewConns)
}

const fewConns = 2

// C16: a commit that fails is answered as such, and leaves no message.
func TestCommitFails(t *testing.T) {
	t.Parallel()
	for name, how := range breakages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := sqliteFile(t)
			if how.dialect == "postgres" {
				d = database{dsn: testdb.Postgres(t).DSN}
			}
			a := newApp(t, d)
			url := a.serve(t) + "/orders"
			shrinkPool(t, a.db)
			execute(t, a.db, how.breaks...)
			for range 2 * fewConns {
				wantError(t, send(t, http.MethodPost, url, validOrder), http.StatusInternalServerError, "could not do this")
			}
			a.wantStored(t, 0, 0)
			execute(t, a.db, how.heals)
			if got := send(t, http.MethodPost, url, validOrder); got.status != http.StatusCreated {
				t.Errorf("answered %d afterwards", got.status)
			}
			a.wantStored(t, 1, 1)
			if entries, _, _ := a.journal.Since(0); len(entries) != 1 {
				t.Errorf("the journal has %+v", entries)
			}
		})
	}
}

// C16: whatever a handler answers, and however it ends, its transaction ends
// with it.
func TestEveryAnswerEndsItsTransaction(t *testing.T) {
	t.Parallel()
	order := func() *Order { return &Order{Customer: "Ada", Item: "cup", Quantity: 1} }
	place := func(a *app, c *gin.Context) error { return a.orders.Place(c.Request.Context(), order()) }
	for name, test := range map[string]struct {
		handle func(a *app, c *gin.Context)
		status int
		stored int // of each order and message, per request
	}{
		"no content": {func(a *app, c *gin.Context) {
			_ = place(a, c)
			c.Status(http.StatusNoContent)
		}, http.StatusNoContent, 1},
		"redirect": {func(a *app, c *gin.Context) {
			_ = place(a, c)
			c.Redirect(http.StatusFound, "/")
		}, http.StatusFound, 1},
		"not found": {func(a *app, c *gin.Context) {
			a.fail(c, a.orders.Cancel(c.Request.Context(), 1))
		}, http.StatusNotFound, 0},
		"panic after the answer": {func(a *app, c *gin.Context) {
			_ = place(a, c)
			c.String(http.StatusCreated, "placed")
			c.Writer.Flush()
			panic("after the answer")
		}, http.StatusCreated, 1},
		"panic in the transaction": {func(a *app, c *gin.Context) {
			_ = a.db.Transaction(func(tx *gorm.DB) error {
				if err := (Orders{tx, a.journal}).Place(c.Request.Context(), order()); err != nil {
					return err
				}
				panic("in the transaction")
			})
		}, http.StatusInternalServerError, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, d database) {
				a := newApp(t, d)
				a.router.POST("/test", func(c *gin.Context) { test.handle(a, c) })
				url := a.serve(t)
				shrinkPool(t, a.db)
				for range 2 * fewConns {
					if got := send(t, http.MethodPost, url+"/test", ""); got.status != test.status {
						t.Errorf("answered %d, want %d", got.status, test.status)
					}
				}
				stored := 2 * fewConns * test.stored
				a.wantStored(t, int64(stored), stored)
				if got := send(t, http.MethodPost, url+"/orders", validOrder); got.status != http.StatusCreated {
					t.Errorf("answered %d afterwards", got.status)
				}
				a.wantStored(t, int64(stored+1), stored+1)
			})
		})
	}
}

// C16: a client that goes away in the middle leaves neither an order nor a
// message nor a transaction.
func TestClientDisconnects(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) {
		a := newApp(t, d)
		stored := make(chan struct{})
		ended := make(chan error)
		hold := func(tx *gorm.DB) { // after the order was stored, within its transaction
			stored <- struct{}{}
			<-tx.Statement.Context.Done()
		}
		if err := a.db.Callback().Create().After("gorm:create").Register("test:hold", hold); err != nil {
			t.Fatal(err)
		}
		a.router.POST("/test", func(c *gin.Context) {
			ended <- a.orders.Place(c.Request.Context(), &Order{Customer: "Ada", Item: "cup", Quantity: 1})
		})
		url := a.serve(t)
		shrinkPool(t, a.db)
		for range 2 * fewConns {
			ctx, cancel := context.WithCancel(t.Context())
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/test", nil)
				if err != nil {
					t.Error(err)
					return
				}
				if resp, err := client().Do(req); err == nil {
					resp.Body.Close()
					t.Errorf("answered %d", resp.StatusCode)
				}
			}()
			<-stored
			cancel()
			if err := <-ended; err == nil {
				t.Error("the order was placed")
			}
			<-gone
		}
		if err := a.db.Callback().Create().Remove("test:hold"); err != nil {
			t.Fatal(err)
		}
		a.wantStored(t, 0, 0)
		if got := send(t, http.MethodPost, url+"/orders", validOrder); got.status != http.StatusCreated {
			t.Errorf("answered %d afterwards", got.status)
		}
		a.wantStored(t, 1, 1)
	})
}
